#!/usr/bin/env bash
# The standard set for a card, in about thirteen minutes on an H200.
#
#   benchmarks/h200.sh OUT [STEP ...]      steps: check sanitize linear layer nf4-16 overhead; all by default
#
# Rows are appended to OUT/linear.jsonl, OUT/layer.jsonl, OUT/nf4-16.jsonl and OUT/overhead.jsonl as they are measured,
# logs lie beside them. A step that fails or takes too long does not stop the next; the exit status is 1 if any did.
# nf4-16 goes on with the cases of an earlier run of the same commit.
#   PYTHON            the interpreter (python3)
#   BITSANDBYTES      a folder that holds bitsandbytes (and humming) and its dist-info, where it is not installed
#   HALFBYTE_COMMIT   the commit, where this is not a git checkout
set -u
out=${1:?usage: benchmarks/h200.sh OUT [STEP ...]}
shift
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(check sanitize linear layer nf4-16 overhead)
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src${BITSANDBYTES:+:$BITSANDBYTES}${PYTHONPATH:+:$PYTHONPATH}"
shapes=16384x16384,65536x5120,5120x32768,4096x14336,14336x4096,12288x4096,4096x4096
failed=()

# step NAME SECONDS COMMAND...: run it within SECONDS, its output to the screen and to OUT/NAME.log
step() {
    local name=$1 seconds=$2
    shift 2
    echo "== $name (at most $seconds s): $*"
    local start=$SECONDS
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$out/$name.log"
    local status=${PIPESTATUS[0]}
    echo "== $name: status $status after $((SECONDS - start)) s"
    [ "$status" -eq 0 ] || failed+=("$name")
}

for name in "${steps[@]}"; do
    case $name in
    check)
        workers=()
        "$python" -c 'import xdist' 2>/dev/null && workers=(-n 14 --dist worksteal --max-worker-restart 3)
        HALFBYTE_FUZZ=${HALFBYTE_FUZZ:-1000} HALFBYTE_FUZZ_COMPILE=${HALFBYTE_FUZZ_COMPILE:-3} step check 180 "$python" -m pytest -q -m gpu -p no:cacheprovider \
            ${workers[@]+"${workers[@]}"} tests/gpu/test_contract.py tests/gpu/test_fuzz.py tests/gpu/test_execution.py
        ;;
    sanitize)
        step sanitize 120 "$python" tests/gpu/sanitize.py --seconds 100
        ;;
    linear)
        step linear 300 "$python" -m halfbyte bench linear --device cuda --shapes $shapes --M 1,2,4,8 \
            --formats nf4,nf4-64-nested --peers --seconds 0.25 --out "$out/linear.jsonl"
        ;;
    layer)
        step layer 240 "$python" -m halfbyte bench layer --device cuda --model mistral-24b --M 1,4,8,16,32,64,128,512,2048 \
            --peers --seconds 0.1 --out "$out/layer.jsonl"
        ;;
    nf4-16)
        step nf4-16 300 "$python" -m halfbyte bench nf4-16 --resume --out "$out/nf4-16.jsonl"
        ;;
    overhead)
        step overhead 90 "$python" -m halfbyte bench overhead --device cuda --out "$out/overhead.jsonl"
        ;;
    *)
        echo "no step '$name'; there are check, sanitize, linear, layer, nf4-16, overhead" >&2
        exit 2
        ;;
    esac
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
