#!/usr/bin/env bash
# Trains, or measures, over the kernel's own queues: every worker and the PS in a network namespace
# of its own, each worker's uplink shaped by htb with one class per class selector of DSCP, traffic of
# others beside it, random loss where it arrives. The downlink is not shaped. Needs root; leaves
# nothing behind.
#
#   bench/transport/netns.sh --check              show what is missing
#   bench/transport/netns.sh probe                what each class gets beside the background traffic
#   bench/transport/netns.sh train FLAG...        PS, workers and Supervisor with these flags of main.py
#
# Settings are variables: WORKERS=2 RATE_MBPS=100 LOSS=0 (a fraction) QUEUE_KB=250 (of each
# class) BACKGROUND_MBPS=0 BACKGROUND_CLASS=4 (0 is served first, 7 is best effort) PYTHON=...
set -euo pipefail
cd "$(dirname "$0")/../.."

WORKERS=${WORKERS:-2}
RATE_MBPS=${RATE_MBPS:-100}
LOSS=${LOSS:-0}
QUEUE_KB=${QUEUE_KB:-250}
BACKGROUND_MBPS=${BACKGROUND_MBPS:-0}
BACKGROUND_CLASS=${BACKGROUND_CLASS:-4}
PYTHON=${PYTHON:-.venv/bin/python}
PS=tw$$-ps
ADDRESS=10.77.0.1
SINK_PORT=9
CHILDREN=()

log() { echo "netns: $*" >&2; }

check() {
  local missing=0 name
  [ "$(id -u)" = 0 ] || { log "not root"; missing=1; }
  for name in ip tc nft; do
    command -v "$name" >/dev/null || { log "no $name: install iproute2 and nftables"; missing=1; }
  done
  [ -x "$PYTHON" ] || { log "no $PYTHON: run make setup, or set PYTHON"; missing=1; }
  [ "$missing" = 0 ] || return 1
  # Whether the kernel can is found out by doing it.
  local try=tw$$-try
  trap 'ip netns del '"$try"' 2>/dev/null || true' RETURN
  ip netns add "$try" || { log "no network namespaces"; return 1; }
  ip -n "$try" link add try0 type veth peer name try1 || { log "no veth"; return 1; }
  tc -n "$try" qdisc add dev try0 root handle 1: htb || { log "no sch_htb in the kernel"; missing=1; }
  tc -n "$try" filter add dev try0 parent 1: protocol ip u32 match ip dsfield 0xe0 0xe0 flowid 1:1 ||
    { log "no cls_u32 in the kernel"; missing=1; }
  ip -n "$try" link set try0 gso_max_segs 1 || { log "ip does not know gso_max_segs"; missing=1; }
  printf 'table netdev t {\n chain c {\n type filter hook ingress device try1 priority 0\n%s\n }\n}\n' \
    'numgen random mod 100 < 1 drop' | ip netns exec "$try" nft -f - ||
    { log "no nftables with numgen and the ingress hook in the kernel"; missing=1; }
  [ "$missing" = 0 ]
}

down() {
  trap - EXIT
  local pid number
  for pid in "${CHILDREN[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${CHILDREN[@]}"; do wait "$pid" 2>/dev/null || true; done
  for number in $(seq "$WORKERS"); do ip netns del "tw$$-w$number" 2>/dev/null || true; done
  ip netns del "$PS" 2>/dev/null || true
}

shape() { # NAMESPACE DEVICE
  tc -n "$1" qdisc add dev "$2" root handle 1: htb default 17 r2q 1000
  tc -n "$1" class add dev "$2" parent 1: classid 1:1 htb rate "${RATE_MBPS}mbit" \
    ceil "${RATE_MBPS}mbit" burst 3000 cburst 3000
  local class selector
  for class in $(seq 0 7); do
    # What a class is sure of is next to nothing; the rest is lent by priority.
    tc -n "$1" class add dev "$2" parent 1:1 classid "1:1$class" htb rate 64kbit \
      ceil "${RATE_MBPS}mbit" prio "$class" quantum 1514 burst 1600 cburst 3000
    tc -n "$1" qdisc add dev "$2" parent "1:1$class" bfifo limit "$((QUEUE_KB * 1000))"
    selector=$(((7 - class) << 5))
    tc -n "$1" filter add dev "$2" parent 1: protocol ip prio 1 u32 \
      match ip dsfield "$(printf 0x%02x "$selector")" 0xe0 flowid "1:1$class"
  done
}

lose() { # DEVICE
  local per_million
  per_million=$(awk "BEGIN { print int($LOSS * 1000000) }")
  [ "$per_million" = 0 ] && return
  printf 'table netdev %s {\n chain c {\n type filter hook ingress device %s priority 0\n%s\n }\n}\n' \
    "$1" "$1" "numgen random mod 1000000 < $per_million counter drop" | ip netns exec "$PS" nft -f -
}

up() {
  trap down EXIT
  trap 'exit 130' INT TERM
  ip netns add "$PS"
  ip -n "$PS" link set lo up
  ip -n "$PS" address add "$ADDRESS/32" dev lo
  local number namespace
  for number in $(seq "$WORKERS"); do
    namespace=tw$$-w$number
    ip netns add "$namespace"
    ip -n "$namespace" link set lo up
    ip -n "$namespace" link add way0 type veth peer name "w$number" netns "$PS"
    ip -n "$namespace" address add "10.77.$number.2/24" dev way0
    ip -n "$PS" address add "10.77.$number.1/24" dev "w$number"
    # Packets of ordinary size: else one loss takes 64 KB, and no urgent packet gets between.
    ip -n "$namespace" link set way0 gso_max_segs 1 up
    ip -n "$PS" link set "w$number" gso_max_segs 1 up
    ip -n "$namespace" route add default via "10.77.$number.1"
    shape "$namespace" way0
    lose "w$number"
  done
}

background() { # NAMESPACE
  [ "$BACKGROUND_MBPS" = 0 ] && return
  ip netns exec "$1" "$PYTHON" -m bench.transport.netns blast "$ADDRESS" "$SINK_PORT" "$BACKGROUND_MBPS" \
    "$BACKGROUND_CLASS" &
  CHILDREN+=($!)
}

sink() {
  ip netns exec "$PS" "$PYTHON" -m bench.transport.netns sink "$SINK_PORT" &
  CHILDREN+=($!)
}

probe() {
  up
  sink
  ip netns exec "$PS" "$PYTHON" -m bench.transport.netns serve 7000 &
  CHILDREN+=($!)
  background "tw$$-w1"
  ip netns exec "tw$$-w1" "$PYTHON" -m bench.transport.netns probe "$ADDRESS" 7000 "$SINK_PORT" "$RATE_MBPS"
  tc -s -n "tw$$-w1" class show dev way0 | grep -A1 'htb 1:1[0-7]' | grep -v '^--' >&2
}

train() {
  up
  sink
  local number workers=()
  local common=(--nb_workers="$WORKERS" --ip_PS="$ADDRESS" "$@")
  ip netns exec "$PS" "$PYTHON" main.py --type_node=PS --insecure "${common[@]}" &
  CHILDREN+=($!)
  for number in $(seq "$WORKERS"); do
    background "tw$$-w$number"
    ip netns exec "tw$$-w$number" "$PYTHON" main.py --type_node=Worker --id_worker="$number" \
      "${common[@]}" &
    CHILDREN+=($!)
    workers+=($!)
  done
  # The Supervisor ends with the run, and writes its report.
  local status=0
  ip netns exec "$PS" "$PYTHON" main.py --type_node=Supervisor "${common[@]}" || status=$?
  for number in "${workers[@]}"; do wait "$number" || status=$?; done
  for number in $(seq "$WORKERS"); do
    log "worker $number, uplink:"
    tc -s -n "tw$$-w$number" class show dev way0 | grep -A1 'htb 1:1[0-7]' | grep -v '^--' >&2
  done
  return "$status"
}

case ${1:-} in
  --check) check && log "nothing is missing" ;;
  probe) check && probe ;;
  train) check && { shift; train "$@"; } ;;
  *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
