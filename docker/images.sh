#!/usr/bin/env bash
# Builds the image for CPU and the one for CUDA, and asks the first for tokens, with docker, podman or buildah.
#   KINDS=cpu bash docker/images.sh        one of them
#   BUILD_ARGS=… RUN_ARGS=… further words for the engine, as in --volume=…
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

engine=""
for each in docker podman buildah; do
  if "$each" info >/dev/null 2>&1; then engine=$each; break; fi # a client alone does not build
done
if [ -z "$engine" ]; then
  echo "make images: there is no docker, podman or buildah that works (Debian: apt-get install buildah)" >&2
  exit 2
fi

read -ra build_args <<<"${BUILD_ARGS:-}"
read -ra run_args <<<"${RUN_ARGS:-}"
# A health check is no part of the other format of images.
case "$engine" in podman | buildah) build_args+=(--format docker) ;; esac
declare -A index=([cpu]=https://download.pytorch.org/whl/cpu [cuda]=https://download.pytorch.org/whl/cu130)
for kind in ${KINDS:-cpu cuda}; do
  "$engine" build "${build_args[@]}" --file docker/Dockerfile --tag "parallelformers-ng:$kind" \
    --build-arg "TORCH_INDEX=${TORCH_INDEX:-${index[$kind]}}" .
done

ask() { # a container that runs $@: its server is started, asked, and told to end
  "$@" python - <<'PYTHON'
import json, os, signal, socket, subprocess, time, urllib.request

assert os.getuid() != 0, "the image runs as root"
with socket.create_server(("127.0.0.1", 0)) as free:  # an engine may give a container this machine's network
    port = str(free.getsockname()[1])
url = f"http://127.0.0.1:{port}"
server = subprocess.Popen(["parallelformers-ng", "serve", "--port", port, "--num-gpus", "2", "examples/demo_model"])
request = urllib.request.Request(
    f"{url}/v1/completions",
    json.dumps({"prompt": "And it came to pass", "max_tokens": 8, "temperature": 0}).encode(),
    {"Content-Type": "application/json"},
)
for _ in range(600):
    try:
        urllib.request.urlopen(f"{url}/ready")
        break
    except OSError:
        assert server.poll() is None, "the server has ended"
        time.sleep(0.5)
answer = json.load(urllib.request.urlopen(request))
assert answer["usage"]["completion_tokens"] == 8, answer
print("the image answers:", answer["choices"][0]["text"])
server.send_signal(signal.SIGTERM)
assert server.wait(60) == 0
PYTHON
}

case "${KINDS:-cpu}" in *cpu*) ;; *) exit 0 ;; esac
if [ "$engine" = buildah ]; then
  container=$(buildah from parallelformers-ng:cpu)
  trap 'buildah rm "$container" >/dev/null' EXIT
  ask buildah run "${run_args[@]}" --user server "$container" --
else
  ask "$engine" run --rm --interactive --read-only --tmpfs /tmp --cap-drop ALL "${run_args[@]}" --entrypoint "" parallelformers-ng:cpu
fi
