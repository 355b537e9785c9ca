# shellcheck shell=bash
# Part "python": uv, and the checkout's own environment exactly as requirements.lock says.

UV=$OUTBOX_CACHE/uv/$UV_VERSION/bin/uv

setup_python() {
  command -v python3 >/dev/null || fail "Python 3.11 is needed"
  with_lock "$OUTBOX_CACHE/locks/uv" cached "uv/$UV_VERSION" install_uv
  with_lock "$OUTBOX_CACHE/locks/venv${CHECKOUT//\//-}" telling "the Python environment" sync_venv
  say "python: $CHECKOUT/.venv is as requirements.lock says"
}

install_uv() {
  python3 -m venv "$1" 2>/dev/null || {
    debian python3-venv
    python3 -m venv --clear "$1"
  }
  # Not by the environment's own pip script, whose first line holds the temporary folder's name.
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --require-hashes -r "$UV_LOCK"
  say "uv $UV_VERSION installed"
}

sync_venv() {
  local python=$CHECKOUT/.venv/bin/python stamp=$CHECKOUT/.venv/.synced lock project quiet=(--quiet --no-progress)
  lock=$(hash_of "$CHECKOUT/requirements.lock")
  project=$(hash_of "$CHECKOUT/pyproject.toml")
  if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$lock $project" ]; then return 0; fi
  (
    cd "$CHECKOUT" || exit 1
    [ -x "$python" ] || "$UV" venv "${quiet[@]}" --python "$(command -v python3)" .venv
    # A sync takes away what the lock does not name, the project too: only when the lock is another.
    case $(cat "$stamp" 2>/dev/null) in
      "$lock "*) ;;
      *) "$UV" pip sync "${quiet[@]}" --python "$python" --require-hashes requirements.lock ;;
    esac
    "$UV" pip install "${quiet[@]}" --python "$python" --no-deps --editable .
  )
  echo "$lock $project" >"$stamp"
}
