"""One example for the `--help` of every command, and option names of earlier versions.

The commands' own modules have the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By a command's words: the line after `farm`.
EXAMPLES: Mapping[str, str] = {
    "quickstart": "quickstart --model resnet18 --trials 64",
    "init": "init --board-type jetson-nano --ssh farm@192.0.2.11 --ssh farm@192.0.2.12 --out rack",
    "tune": "tune model.onnx --board-type jetson-nano --trials 500",
    "gate": "gate model.onnx --baseline baseline.json --boards jetson-nano --fail-if 'latency > 5 %'",
    "doctor": "doctor --board nano-01",
    "up": "up --wait 60s",
    "down": "down",
    "web": "web --port 8642",
    "web token": "web token --new",
    "web token add": "web token add ann --role user",
    "web token list": "web token list",
    "web token remove": "web token remove ann",
    "web url": "web url",
    "status": "status",
    "notices list": "notices list",
    "notices test": "notices test ops",
    "audit": "audit --of nano-01 --since 7d",
    "logs": "logs --campaign vision-q4 --follow",
    "backup": "backup farm-backup.db",
    "restore": "restore farm-backup.db",
    "completion": "completion bash",
    "schema": "schema campaign",
    "db check": "db check --remove",
    "db upgrade": "db upgrade",
    "db prune": "db prune --until 90d --dry-run",
    "model zoo": "model zoo",
    "model explain": "model explain model-nano --out explained",
    "model show": "model show model.onnx --shape images=1,3,224,224",
    "model compile": "model compile model.onnx --board-type jetson-nano --out model-nano",
    "model verify": "model verify model-nano --board nano-01",
    "model package": "model package model-nano --format wheel --out dist/",
    "model deploy": "model deploy model-nano --board nano-01",
    "model run": "model run model-nano --board nano-01 --input photo.png --operating-point a57=921.6MHz",
    "model evaluate": "model evaluate efficientnet-lite0 --data images --weights float32,int8",
    "model fetch": "model fetch efficientnet-lite0",
    "model bench": "model bench model-nano --board nano-01 --out bench",
    "model quantize": "model quantize model.onnx --calibration photos/ --out model-int8.onnx",
    "record list": "record list --board-type jetson-nano --operator conv2d --since 7d",
    "record show": "record show 17",
    "record best": "record best conv2d_add_relu --board-type jetson-nano",
    "record export": "record export nano-records --board-type jetson-nano",
    "record import": "record import nano-records",
    "record pull": "record pull zoo",
    "record merge": "record merge other-farm.db",
    "record prune": "record prune --until 90d --dry-run",
    "board add": "board add nano-01 --board-type jetson-nano --ssh farm@192.0.2.11",
    "board list": "board list",
    "board show": "board show nano-01",
    "board types": "board types",
    "board remove": "board remove nano-01",
    "board replace": "board replace nano-01 --ssh farm@192.0.2.12 --reason 'broken fan'",
    "board drain": "board drain nano-01 --reason 'new heat sink'",
    "board undrain": "board undrain nano-01",
    "board quarantine": "board quarantine nano-01 --reason 'wrong outputs'",
    "board clear": "board clear nano-01 --reason 'new power supply'",
    "board retire": "board retire nano-01",
    "board release": "board release nano-01 --force --reason 'its user left'",
    "board reserve": "board reserve nano-01 --for 2h --why debugging",
    "board power": "board power nano-01 cycle",
    "board probe": "board probe nano-01",
    "board exec": "board exec nano-01 -- uptime",
    "board logs": "board logs nano-01 --lines 100",
    "board trust": "board trust nano-01 --fingerprint SHA256:iSNGFULUyEpBPQs0CnjMlKPhNEhTHnPN6hqFvURnUOI",
    "board provision": "board provision nano-01 --dry-run",
    "board doctor": "board doctor nano-01",
    "board certify": "board certify nano-01 --out certificate",
    "queue": "queue",
    "queue priority": "queue priority 12 3",
    "fleet check": "fleet check fleet.yaml",
    "fleet apply": "fleet apply fleet.yaml --dry-run",
    "sweep run": "sweep run resnet18 --board nano-01 --cpu-freqs 'a57=614.4MHz,921.6MHz,1479MHz' --deadline 50ms",
    "sweep plan": "sweep plan resnet18 --board nano-01 --cpu-freqs all --deadline 50ms",
    "artifact list": "artifact list --board-type jetson-nano --verified",
    "bench list": "bench list --board-type jetson-nano",
    "bench show": "bench show 3 --price-per-hour 0.05EUR --battery 50Wh",
    "bench compare": "bench compare 3 7",
    "report matrix": "report matrix --out matrix --price-per-kwh 0.30EUR",
    "sweep resume": "sweep resume 3",
    "sweep list": "sweep list",
    "sweep show": "sweep show 3",
    "sweep pick": "sweep pick 3 --deadline 33ms --max-power 5W",
    "sweep report": "sweep report 3 --out report",
    "sweep export": "sweep export 3 --as nvpmodel --out mode.conf",
    "sweep compare": "sweep compare 3 4",
    "bundle build": "bundle build --board-type jetson-nano --out nano.tar",
    "bundle show": "bundle show nano.tar",
    "campaign plan": "campaign plan campaign.yaml",
    "campaign run": "campaign run campaign.yaml --compile dist",
    "campaign attach": "campaign attach vision",
    "campaign resume": "campaign resume vision",
    "campaign clone": "campaign clone vision vision-2 --trials 2000",
    "campaign list": "campaign list",
    "campaign show": "campaign show vision",
    "campaign report": "campaign report vision --out report",
    "campaign pause": "campaign pause vision",
    "campaign cancel": "campaign cancel vision",
    "campaign budget": "campaign budget vision --trials 2000",
}
# Accepted and not shown.
FORMER: Mapping[str, Mapping[str, str]] = {
    "board add": {"type": "board-type"},
    "bundle build": {"output": "out"},
    "model compile": {"labels": "classes"},
    "sweep export": {"key": "operating-point"},
}


def complete(command: Any, words: tuple[str, ...] = ()) -> None:
    """Give a command, or all of a group, their examples and former option names."""
    for name, each in getattr(command, "commands", {}).items():
        complete(each, (*words, name))
    path = " ".join(words)
    if example := EXAMPLES.get(path):
        command.epilog = f"\b\nExample:\n  farm {example}"  # \b: left as it is
    if former := FORMER.get(path):
        command.context_settings = command.context_settings | {
            "token_normalize_func": lambda name: former.get(name, name)
        }
