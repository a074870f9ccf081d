"""Sends values between processes: encodes values into frames, and sends frames over sockets, signed between hosts."""
