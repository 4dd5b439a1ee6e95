#!/bin/sh
# The life of a job over HTTP, with curl: validate, start, list, ask, update, restart, stop, forget.
#
#   headrace serve &
#   deploy/examples/api.sh JOB.json            (or JOB.toml)
#
# What may be set: URL, of the control API; TOKEN, of an admin; PROMPT, to be completed by the job; CHECKPOINT, a folder
# with new weights, for a job file with [weights].
set -eu

job_file=$1
URL=${URL:-http://127.0.0.1:8700}
TOKEN=${TOKEN:-$(cat "${HEADRACE_HOME:-$HOME/.local/state/headrace}/api-token")}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT

# Keeps the token out of command lines, which every user of the machine sees.
(umask 077 && printf 'header = "Authorization: Bearer %s"\nsilent\nshow-error\nfail-with-body\n' "$TOKEN" >"$folder/curl")

call() { # METHOD PATH [further arguments of curl]
    method=$1 path=$2
    shift 2
    curl --config "$folder/curl" --request "$method" "$@" "$URL$path"
}

field() { # EXPRESSION: prints a part of the JSON on stdin, which is `it`
    python3 -c 'import json, sys; it = json.load(sys.stdin); print(eval(sys.argv[1]))' "$1"
}

# Every answer with 202 names its operation. Its events end when it has.
follow() { # reads the answer on stdin
    operation=$(field 'it["operation"]')
    call GET "/operations/$operation/events" --no-buffer >"$folder/events"
    call GET "/operations/$operation" >"$folder/operation"
    field '"%(kind)s %(target)s: %(state)s, %(text)s" % it' <"$folder/operation"
    test "$(field 'it["state"]' <"$folder/operation")" = succeeded
}

case $job_file in
*.toml) type=application/toml ;;
*) type=application/json ;;
esac
send_job() { call POST "$1" --header "Content-Type: $type" --data-binary "@$job_file"; }
send() { call POST "$1" --header 'Content-Type: application/json' --data "$2"; }

echo "== validate"
send_job /validate >"$folder/verdict"
field 'it["errors"] or "usable"' <"$folder/verdict"
test "$(field 'it["is_usable"]' <"$folder/verdict")" = True

echo "== start"
send_job /jobs >"$folder/started"
name=$(field 'it["name"]' <"$folder/started")
follow <"$folder/started"

echo "== list"
call GET /jobs | field '"\n".join("%(name)s: %(phase)s, %(alive)s of %(processes)s processes" % one for one in it["jobs"])'
call GET "/jobs/$name" >"$folder/job"
router=$(field 'it["router"]["url"]' <"$folder/job")
replica=$(field 'it["engines"][-1]["name"]' <"$folder/job")

if [ -n "${PROMPT:-}" ]; then
    echo "== ask"
    model=$(field 'it["model"]' <"$folder/job")
    body=$(python3 -c 'import json, sys; print(json.dumps(dict(zip(("model", "prompt"), sys.argv[1:]), max_tokens=16)))' "$model" "$PROMPT")
    curl --silent --show-error --fail-with-body "$router/v1/completions" -H 'Content-Type: application/json' -d "$body" |
        field 'it["choices"][0]["text"]'
fi

if [ -n "${CHECKPOINT:-}" ]; then
    echo "== new weights"
    version=from-curl-$(date +%s)
    send "/jobs/$name/weights" "{\"version\": \"$version\", \"source\": {\"transport\": \"path\", \"path\": \"$CHECKPOINT\"}}" | follow
    call GET "/jobs/$name/weights" | field '"%(version)s is served, in epoch %(epoch)s" % it["served"]'
fi

role=$(field 'it["engines"][-1]["role"]' <"$folder/job")
count=$(field '[one["role"] for one in it["engines"]].count(it["engines"][-1]["role"])' <"$folder/job")
for replicas in $((count + 1)) "$count"; do
    echo "== scale $role to $replicas"
    send "/jobs/$name/roles/$role/scale" "{\"replicas\": $replicas}" | follow
done

echo "== restart $replica"
# Forced: a job of one pair serves nobody meanwhile.
send "/jobs/$name/processes/$replica/restart" '{"force": true}' | follow

echo "== what happened"
call GET "/jobs/$name/events?limit=5" | field '"\n".join(one["text"] for one in it["events"])'
call GET "/operations?job=$name" | field '"\n".join("%(id)s %(state)s" % one for one in it["operations"])'

echo "== stop: requests that are open finish first, within a minute"
call DELETE "/jobs/$name?mode=drain&limit_s=60&wait=false" | follow

echo "== forget"
call DELETE "/jobs/$name/record"
