"""Anthropic's API, as the application takes it up."""

from deploy.http.anthropic.endpoints import (
    CountTokensRoute,
    ForgetMessageRoute,
    MessagesEndpoint,
    ReadMessageRoute,
)
from deploy.http.anthropic.errors import anthropic_error
from deploy.http.anthropic.replies import AnthropicError
from deploy.http.dialect import Dialect

ANTHROPIC = Dialect(
    routes=(MessagesEndpoint, ReadMessageRoute, ForgetMessageRoute, CountTokensRoute),
    error_reply=anthropic_error,
    error=AnthropicError,
    prefixes=("/v1/messages",),
)
