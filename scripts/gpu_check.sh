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
"$python" "$here/scripts/gpu_copies.py"
