"""Time llama.cpp of the wheel xllamacpp, and print what its own llama-bench prints with `-o json`."""

import argparse
import json

import xllamacpp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-m", dest="model", required=True, help="a GGUF file")
parser.add_argument("-p", dest="prompt", type=int, default=512, help="tokens of the prompt")
parser.add_argument("-n", dest="generated", type=int, default=128, help="tokens that are generated")
parser.add_argument("-t", dest="threads", type=int, default=4)
given = parser.parse_args()

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.cpuparams.n_threads = given.model, 2048, given.threads
server = xllamacpp.Server(params)
asked = {"n_predict": given.generated, "ignore_eos": True, "cache_prompt": False, "temperature": 0}
answer = server.handle_completions({"prompt": [1000 + n for n in range(given.prompt)], **asked})
took = answer["timings"]
tests = ((given.prompt, 0, took["prompt_per_second"]), (0, given.generated, took["predicted_per_second"]))
print(json.dumps([{"n_prompt": p, "n_gen": n, "n_threads": given.threads, "avg_ts": rate} for p, n, rate in tests]))
