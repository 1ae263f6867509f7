#!/bin/bash
# add_user.sh UID: the user that the server runs as; the CPU kernel and profiles are kept in its home.
set -euo pipefail
groupadd --gid "$1" granikv
useradd --create-home --uid "$1" --gid "$1" --shell /bin/bash granikv
