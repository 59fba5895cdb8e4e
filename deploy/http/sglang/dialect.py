"""SGLang's own API, as the application takes it up."""

from deploy.http.dialect import Dialect
from deploy.http.sglang.control import AbortRoute, FlushCacheRoute, HealthGenerateRoute
from deploy.http.sglang.endpoint import ForgetGenerateRoute, GenerateEndpoint, ReadGenerateRoute
from deploy.http.sglang.errors import sglang_error
from deploy.http.sglang.info import ModelInfoRoute, ServerInfoRoute
from deploy.http.sglang.replies import SGLangError

SGLANG = Dialect(
    routes=(
        GenerateEndpoint,
        ReadGenerateRoute,
        ForgetGenerateRoute,
        AbortRoute,
        FlushCacheRoute,
        HealthGenerateRoute,
        ModelInfoRoute,
        ServerInfoRoute,
    ),
    error_reply=sglang_error,
    error=SGLangError,
    prefixes=("/generate/",),
)
