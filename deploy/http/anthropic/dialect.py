"""Anthropic's API, as the application takes it up."""

from deploy.http.anthropic.endpoints import CountTokensRoute, MessagesEndpoint
from deploy.http.anthropic.errors import anthropic_error
from deploy.http.anthropic.replies import AnthropicError
from deploy.http.dialect import Dialect

ANTHROPIC = Dialect(
    routes=(MessagesEndpoint, CountTokensRoute),
    error_reply=anthropic_error,
    error=AnthropicError,
    prefixes=("/v1/messages",),
)
