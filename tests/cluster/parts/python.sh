# shellcheck shell=bash
# Part "python": uv, and the checkout's own environment exactly as requirements.lock says.

UV=$OUTBOX_CACHE/uv/$UV_VERSION/bin/uv

setup_python() {
  command -v python3 >/dev/null || fail "Python 3.11 is needed"
  with_lock "$OUTBOX_CACHE/locks/uv" cached "uv/$UV_VERSION" install_uv
  with_lock "$CHECKOUT/.venv.lock" sync_venv
  say "python: $CHECKOUT/.venv is as requirements.lock says"
}

install_uv() {
  python3 -m venv "$1" 2>/dev/null || {
    debian python3-venv
    python3 -m venv --clear "$1"
  }
  # Not by the environment's own pip script, whose first line holds the temporary folder's name.
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "uv==$UV_VERSION"
  say "uv $UV_VERSION installed"
}

sync_venv() {
  local python=$CHECKOUT/.venv/bin/python key
  key=$(hash_of "$CHECKOUT/requirements.lock" "$CHECKOUT/pyproject.toml")
  [ -x "$python" ] && [ "$(cat "$CHECKOUT/.venv/.synced" 2>/dev/null)" = "$key" ] && return 0
  local quiet=(--quiet --no-progress)

  [ -x "$python" ] || "$UV" venv "${quiet[@]}" --python "$(command -v python3)" "$CHECKOUT/.venv"
  (
    cd "$CHECKOUT" || exit 1
    "$UV" pip sync "${quiet[@]}" --python "$python" --require-hashes requirements.lock
    "$UV" pip install "${quiet[@]}" --python "$python" --no-deps --editable .
  )
  echo "$key" >"$CHECKOUT/.venv/.synced"
}
