"""Defines the requests of `/v1/score` and `/v1/rerank`, with the field names of vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from parallelformers_ng.serving.api_errors import bad_request
from parallelformers_ng.serving.fields import RERANK, SCORE
from parallelformers_ng.serving.requests import ApiRequest
from parallelformers_ng.serving.structured import Fields, Texts, as_list


class ScoreRequest(ApiRequest):
    """Request for scores of text pairs: one first text for all second texts, or one first text for each second text.

    Attributes:
        text_1, data_1, queries: first texts. A request has exactly one of these three fields.
        text_2, data_2, documents, items: second texts. A request has exactly one of these four fields.
        use_activation: whether scores are results of the activation function; False for logits.
    """

    route = SCORE

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    use_activation: bool = True

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first = self._texts("text_1", "data_1", "queries")
        second = self._texts("text_2", "data_2", "documents", "items")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            texts = f"{len(first)} first texts and {len(second)} second texts"
            raise bad_request(f"the request has {texts}; send one first text, or the same number of both", "text_1")
        return list(zip(first, second, strict=True))

    def _texts(self, *names: str) -> list[str]:
        values: list[list[str]] = [value for name in names if (value := getattr(self, name)) is not None]
        if len(values) != 1:
            raise bad_request(f"the request has {len(values)} of the fields {', '.join(names)}; send one", names[0])
        return values[0]


class Document(Fields):
    text: str


_Text = str | Document


class RerankRequest(ApiRequest):
    """Request to `/v1/rerank`, which sorts documents by their score against a query.

    Attributes:
        documents: texts, or objects with a text; one text counts as a list of one text.
        top_n: maximum number of results; 0 for every document.
        return_documents: whether the results have the texts of the documents.
        use_activation: whether scores are results of the activation function; False for logits.
    """

    route = RERANK

    query: str
    documents: Annotated[list[_Text], BeforeValidator(as_list, json_schema_input_type=str | list[_Text])]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool = True
    use_activation: bool = True

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]
