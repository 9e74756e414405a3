"""Typed questions about an input, answered with probabilities: the public interface."""

from vllm_mlx_harmony.protocols.decisions.emitter import Emitter as Emitter
from vllm_mlx_harmony.protocols.decisions.openai import read_openai as read_openai
from vllm_mlx_harmony.protocols.decisions.question import Option as Option
from vllm_mlx_harmony.protocols.decisions.question import Question as Question
from vllm_mlx_harmony.protocols.decisions.request import DecisionRequest as DecisionRequest
from vllm_mlx_harmony.protocols.decisions.systemone import read_systemone as read_systemone
