"""Ollama's API: a request body into a Turn, deltas into lines of JSON or a document; models."""

from vllm_mlx_harmony.protocols.ollama.emitter import Emitter as Emitter
from vllm_mlx_harmony.protocols.ollama.emitter import error_body as error_body
from vllm_mlx_harmony.protocols.ollama.emitter import loaded as loaded
from vllm_mlx_harmony.protocols.ollama.models import VERSION as VERSION
from vllm_mlx_harmony.protocols.ollama.models import model_in as model_in
from vllm_mlx_harmony.protocols.ollama.models import running as running
from vllm_mlx_harmony.protocols.ollama.models import shown as shown
from vllm_mlx_harmony.protocols.ollama.models import tags as tags
from vllm_mlx_harmony.protocols.ollama.request import OllamaRequest as OllamaRequest
from vllm_mlx_harmony.protocols.ollama.request import loads_only as loads_only
from vllm_mlx_harmony.protocols.ollama.request import read_chat as read_chat
from vllm_mlx_harmony.protocols.ollama.request import read_generate as read_generate
