#!/usr/bin/env bash
# What is to be known of a machine with a GPU, by one command:
#
#     benchmarks/gpu.sh -m TARGET.gguf [-d DRAFT.gguf] [-o FOLDER] [-s STEP,STEP,...]
#     benchmarks/gpu.sh --build cuda|hip|vulkan [--wheels FOLDER]
#
# --build compiles llama-cpp-python with that backend, whatever pip has installed or cached, then pyfly-cpp, into the
# Python environment that is active; with --wheels from the files of that folder alone, without a network.
# Otherwise every step runs for ten minutes at most, and is done once: the same command resumes where it was interrupted,
# and tries a step that failed again. The steps:
#     tests                 pytest -m device
#     costs-all, costs-half batches of 1 to 512 rows, with all layers on the GPU and with half of them
#     changes               batches that change their size
#     lookup                prompt lookup
#     draft                 with -d: a draft model or a head
#     parallel              1 to 64 texts at a time; PROMPTS names the prompts, such as Spec-Bench's question.jsonl
#     gsm8k                 a hundred items of the JSONL file that GSM8K names
# FOLDER (default: gpu-results) gets a log and tables for each, and table.md.
set -uo pipefail
cd "$(dirname "$0")/.."

die() { echo "gpu.sh: $1" >&2; exit 2; }

target= draft= out=gpu-results steps=tests,costs-all,costs-half,changes,lookup,draft,parallel,gsm8k build= wheels=
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || die "$1 needs a value; the first lines of this file say which"
    case $1 in
        -m) target=$2 ;;
        -d) draft=$2 ;;
        -o) out=$2 ;;
        -s) steps=$2 ;;
        --build) build=$2 ;;
        --wheels) wheels=$2 ;;
        *) die "$1 is no option; the first lines of this file list them" ;;
    esac
    shift 2
done

if [ -n "$build" ]; then
    case $build in
        cuda | hip | vulkan) ;;
        *) die "--build $build: it is cuda, hip or vulkan" ;;
    esac
    from=()
    [ -n "$wheels" ] && from=(--no-index --find-links "$wheels")
    llama_cpp_python=$(sed -n 's/.*"\(llama-cpp-python==[0-9.]*\)".*/\1/p' pyproject.toml | head -1)
    pip install "${from[@]}" scikit-build-core cffi cmake ninja numpy &&
        CMAKE_ARGS="-DGGML_${build^^}=ON" pip install "${from[@]}" --no-build-isolation --no-binary llama-cpp-python \
            --no-cache-dir --force-reinstall "$llama_cpp_python" &&
        pip install "${from[@]}" --no-build-isolation ".[demo,test]"
    exit
fi
[ -f "$target" ] || die "-m ${target:-TARGET} is no file"
[ -z "$draft" ] || [ -f "$draft" ] || die "-d $draft is no file"
python -c 'import sys, llama_cpp; sys.exit(not llama_cpp.llama_supports_gpu_offload())' ||
    die "this llama-cpp-python has no GPU here; --build cuda (hip, vulkan) installs one that may"

mkdir -p "$out" || die "the folder $out cannot be made"
fly=(python -m pyfly_cpp)

# step NAME COMMAND...: runs it unless it is done or was not asked for.
step() {
    local name=$1 begin=$SECONDS rc
    shift
    [[ ,$steps, == *",$name,"* ]] || return 0
    [ -f "$out/$name.done" ] && return 0
    echo "== $name"
    timeout -k 10 600 "$@" >"$out/$name.log" 2>&1
    rc=$?
    tail -n 12 "$out/$name.log"
    if [ $rc = 0 ]; then
        echo "| $name | done | $((SECONDS - begin)) s |" >"$out/$name.done"
        rm -f "$out/$name.failed"
    else
        echo "| $name | failed (exit $rc): $name.log | $((SECONDS - begin)) s |" >"$out/$name.failed"
    fi
}

# bench NAME OPTIONS...
bench() {
    local name=$1
    shift
    step "$name" "${fly[@]}" bench -m "$target" -n 128 -o "$out/$name.json" --markdown "$out/$name.md" "$@"
}

"${fly[@]}" doctor -m "$target" >"$out/doctor.txt" 2>&1
step tests python -m pytest -m device -n 0 -q -rA tests/test_device.py
half=$(sed -n 's/.* \([0-9]*\) layers.*/\1/p' "$out/doctor.txt" | head -1)
half=$((${half:-2} / 2))
for layers in all half; do
    step "costs-$layers" python benchmarks/kernels.py --model "$target" --rows 1,2,3,4,6,8,12,16,32,64,512 --behind 512 \
        --gpu-layers "$([ $layers = all ] && echo -1 || echo "$half")"
done
step changes python benchmarks/kernels.py --changes --model "$target" --rows 1,2,4,8,16 --behind 512 --repeats 16 --gpu-layers -1
bench lookup -s "exact lookup adaptive" -s "exact lookup k=15" -s "margin:0.3 lookup k=15" -s "entropy:0.3 lookup k=15"
[ -n "$draft" ] &&
    bench draft -d "$draft" -s "exact draft adaptive" -s "exact draft k=15" -s "entropy:0.3 draft k=15" -s "margin:0.3 draft k=15"
[ -n "${PROMPTS:-}" ] &&
    bench parallel -s "exact lookup adaptive" --parallel 1,2,4,8,16,32,64 -c 1024 --prompts "$PROMPTS" --limit 64
[ -n "${GSM8K:-}" ] &&
    step gsm8k "${fly[@]}" eval gsm8k --data "$GSM8K" -m "$target" ${draft:+-d "$draft"} -s exact -s entropy:0.3 -s margin:0.3 \
        --limit 100 --parallel 8 -o "$out/gsm8k"

{
    echo "# $(basename "$target")"
    echo
    echo "| step | result | time |"
    echo "| --- | --- | --- |"
    cat "$out"/*.done "$out"/*.failed 2>/dev/null
    for table in "$out"/*.md "$out"/gsm8k/table.md; do
        [ "$table" = "$out/table.md" ] || [ ! -f "$table" ] || { echo && cat "$table"; }
    done
} >"$out/table.md"
echo "== $out/table.md"
! ls "$out"/*.failed >/dev/null 2>&1
