"""Write tiny.gguf, a LLaMA of 9 million seeded random weights, to be timed: docs/howto/sweep-any-program.md."""

import gguf
import numpy as np

LAYERS, WIDTH, FEED, HEADS, WORDS = 6, 256, 1024, 8, 4096
draw = np.random.default_rng(0)
out = gguf.GGUFWriter("tiny.gguf", "llama")
out.add_context_length(2048)
out.add_embedding_length(WIDTH)
out.add_block_count(LAYERS)
out.add_feed_forward_length(FEED)
out.add_head_count(HEADS)
out.add_layer_norm_rms_eps(1e-5)
out.add_rope_dimension_count(WIDTH // HEADS)
special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
out.add_tokenizer_model("llama")
out.add_token_list(special + [f"w{number}" for number in range(WORDS - len(special))])
out.add_token_scores([0.0] * WORDS)
out.add_token_types([2, 3, 3, *[6] * 256, *[1] * (WORDS - len(special))])  # unknown, control, bytes, words
shapes = {"token_embd": (WORDS, WIDTH), "output": (WORDS, WIDTH), "output_norm": (WIDTH,)}
for layer in range(LAYERS):
    block = {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    block |= {"ffn_gate": (FEED, WIDTH), "ffn_up": (FEED, WIDTH), "ffn_down": (WIDTH, FEED)}
    block |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
    shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
for name, shape in shapes.items():
    out.add_tensor(f"{name}.weight", draw.standard_normal(shape, np.float32) / 16)
out.write_header_to_file()
out.write_kv_data_to_file()
out.write_tensors_to_file()
out.close()
