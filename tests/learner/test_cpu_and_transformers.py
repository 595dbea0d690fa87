"""The CPU adaptation must not change what other libraries compute in the same process."""

import subprocess
import sys

CODE = """
import sys, torch
if sys.argv[2] == "adapted":
    import mcore_agent.learner
from transformers import AutoModelForCausalLM
with torch.device("meta"):
    assert torch.empty(3).device.type == "meta" and torch.arange(3).device.type == "meta"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
print(model(input_ids=torch.arange(3, 20)[None]).logits.double().sum((0, 1))[:7].tolist())
"""


def test_transformers_loads_the_same_model_with_and_without_it(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **shape)).save_pretrained(tmp_path)
    runs = [
        subprocess.run([sys.executable, "-c", CODE, str(tmp_path), how], capture_output=True, text=True, check=True).stdout
        for how in ("plain", "adapted")
    ]
    assert runs[0] == runs[1]
