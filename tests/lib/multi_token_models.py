"""Helpers of tests/models/parts/test_multi_token.py that other tests use too."""


def with_multi_token(arch, count=1):
    return type(arch).model_validate({**arch.model_dump(), "mtp_layers": count})
