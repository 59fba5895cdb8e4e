"""Traces of requests, for OpenTelemetry. Needs the extra `otel`; loaded only if it is asked for."""
