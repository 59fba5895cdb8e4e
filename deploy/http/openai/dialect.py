"""OpenAI's API and vLLM's additions to it, as the application takes them up."""

from deploy.http.batches.routes import (
    CancelBatchRoute,
    CreateBatchRoute,
    ListBatchesRoute,
    RetrieveBatchRoute,
)
from deploy.http.dialect import Dialect
from deploy.http.files.routes import (
    DeleteFileRoute,
    FileContentRoute,
    ListFilesRoute,
    RetrieveFileRoute,
    UploadRoute,
)
from deploy.http.openai.adapters import LoadAdapterRoute, UnloadAdapterRoute
from deploy.http.openai.chat import ChatEndpoint
from deploy.http.openai.completions import (
    CompletionEndpoint,
    ForgetCompletionRoute,
    ReadCompletionRoute,
)
from deploy.http.openai.embeddings import EmbeddingEndpoint
from deploy.http.openai.errors import openai_error
from deploy.http.openai.replies import Error
from deploy.http.openai.responses.endpoint import InputTokensRoute, ResponsesEndpoint
from deploy.http.openai.responses.kept import (
    CancelRoute,
    DeleteResponseRoute,
    InputItemsRoute,
    RetrieveResponseRoute,
)
from deploy.http.openai.score import ScoreEndpoint
from deploy.http.openai.stored_chats import (
    ForgetChatRoute,
    ListChatsRoute,
    MessagesRoute,
    ReadChatRoute,
    UpdateChatRoute,
)
from deploy.http.openai.tokenization import DetokenizeRoute, TokenizeRoute

OPENAI = Dialect(
    routes=(
        CompletionEndpoint,
        ReadCompletionRoute,
        ForgetCompletionRoute,
        ChatEndpoint,
        ListChatsRoute,
        ReadChatRoute,
        UpdateChatRoute,
        ForgetChatRoute,
        MessagesRoute,
        ResponsesEndpoint,
        InputTokensRoute,
        RetrieveResponseRoute,
        DeleteResponseRoute,
        InputItemsRoute,
        CancelRoute,
        EmbeddingEndpoint,
        ScoreEndpoint,
        UploadRoute,
        ListFilesRoute,
        RetrieveFileRoute,
        FileContentRoute,
        DeleteFileRoute,
        CreateBatchRoute,
        ListBatchesRoute,
        RetrieveBatchRoute,
        CancelBatchRoute,
        TokenizeRoute,
        DetokenizeRoute,
        LoadAdapterRoute,
        UnloadAdapterRoute,
    ),
    error_reply=openai_error,
    error=Error,
)
