from parallelformers_ng.policies.bart import BartPolicy


class TimeSeriesTransformerPolicy(BartPolicy):
    """BART's layers over the values of a time series."""

    block = ("TimeSeriesTransformerEncoderLayer", "TimeSeriesTransformerDecoderLayer")
