#!/bin/sh
# On a machine with CUDA, CuPy and torch: install the wheel, run the contract of device memory and the tests of the HBM tier and
# of prefills on the GPU, and print what copies reach beside the plain cudaMemcpyAsync. Under ten minutes.
#   scripts/gpu_check.sh WHEEL        (the wheel of `maturin build --release`)
set -eu
wheel=${1:?give the wheel: scripts/gpu_check.sh dist/kvtier-....whl}
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
"$python" -c 'import cupy, torch; assert torch.cuda.is_available(), "torch sees no GPU"'
"$python" -m pip install --quiet "$wheel[transformers]" pytest pytest-timeout hypothesis
cd "$here/tests"
"$python" -m pytest -p no:cacheprovider -rs --timeout 120 test_devices.py test_hbm.py test_prefill_hbm.py
"$python" - <<'PYTHON'
import time
import cupy
import numpy as np
from kvtier.tiers import Copy
from kvtier.tiers.cuda import CupyBackend

SIZE, ROUNDS = 256 << 20, 9
backend = CupyBackend(SIZE)
stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.alloc(SIZE)
runtime = cupy.cuda.runtime


def median(work):
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return sorted(times)[ROUNDS // 2]


def plain(host, way):
    kind = (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost)[way]
    pair = (pool.ptr, host.ctypes.data) if way == 0 else (host.ctypes.data, pool.ptr)
    runtime.memcpyAsync(*pair, SIZE, kind, stream.ptr)
    stream.synchronize()


for kind in ("pageable", "pinned"):
    host = np.ones(SIZE, np.uint8)
    if kind == "pinned":
        backend.register(host)
    blocks = [Copy(at, host[at : at + (1 << 20)]) for at in range(0, SIZE, 1 << 20)]
    for way, name in ((0, "H2D"), (1, "D2H")):
        batch = (backend.copy_in, backend.copy_out)[way]
        ours, bound = median(lambda: batch(blocks).wait()), median(lambda: plain(host, way))
        print(f"{name} {kind}: {SIZE / ours / 1e9:.1f} GB/s in blocks of 1 MiB, plain {SIZE / bound / 1e9:.1f} GB/s, ratio {bound / ours:.2f}")
backend.close()
PYTHON
