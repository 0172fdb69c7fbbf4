"""The tiny policy: a character tokenizer and a small random Llama."""

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..config.sections import ModelConfig
from .spec import DTYPES, ModelSpec

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*/=%^()<>.,:;?! \n"
# A multiple of 8 without padding, so no padded row of the head needs masking.
VOCABULARY = (PAD, EOS, UNK, *CHARACTERS)
assert len(VOCABULARY) % 8 == 0

# With the usual 0.02 attention is almost uniform at this width, and a warm-up of one minute would
# end before the model attends to the digits that it copies.
INIT_STD = 0.08


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character of `CHARACTERS`; no token is added before or after a text."""
    ids = {token: id for id, token in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def build_policy(shape: ModelConfig, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights for `build_tokenizer`, on the CPU, its head tied.

    The global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(_config(shape))
    for parameter in model.parameters():  # not the frequencies of RoPE, as in a loaded model
        parameter.data = parameter.data.to(DTYPES[shape.dtype])
    return model


def spec(shape: ModelConfig) -> ModelSpec:
    named = {"architectures": [LlamaForCausalLM.__name__], "dtype": shape.dtype}
    return ModelSpec.from_config({**_config(shape).to_dict(), **named})


def _config(shape: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape.hidden_size // 2,
        max_position_embeddings=shape.max_position,
        initializer_range=INIT_STD,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=VOCABULARY.index(EOS),
        pad_token_id=VOCABULARY.index(PAD),
    )
