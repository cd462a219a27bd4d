#!/usr/bin/env bash
# Starts the lossd of a node that is lost on another one.
set -euo pipefail
shopt -s inherit_errexit

usage() {
  cat <<END
usage: deploy/kubernetes/lost_node.sh [--namespace NAME] [--new-volume] [--yes] POD

A pod of a StatefulSet whose node no longer answers stays Terminating, and its volume attached to that node: Kubernetes cannot know whether
lossd still runs there. Once you do know (the machine is off, or gone), this tells Kubernetes so, by the node's taint
node.kubernetes.io/out-of-service, and waits until the pod is ready on another node. It restores its newest checkpoint.

  --namespace   where the pod is (default: lossd)
  --new-volume  begin with an empty volume: for one that no other node can have. Its checkpoints are lost
  --yes         ask neither whether the machine is off nor whether the checkpoints may go

Nothing is changed while the node is ready. Needs kubectl, and the right to list and taint nodes and to delete pods (with --new-volume,
claims).
END
}

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "lost_node.sh: $*"
  exit 1
}

namespace=lossd pod='' new_volume=no sure=no
while (($#)); do
  case $1 in
    --namespace)
      if (($# < 2)); then usage >&2 && exit 2; fi
      namespace=$2 && shift
      ;;
    --new-volume) new_volume=yes ;;
    --yes) sure=yes ;;
    -h | --help) usage && exit ;;
    -*) usage >&2 && exit 2 ;;
    *)
      if [[ -n $pod ]]; then usage >&2 && exit 2; fi
      pod=$1
      ;;
  esac
  shift
done
if [[ -z $pod ]]; then usage >&2 && exit 2; fi

# What a jsonpath says of an object; empty if there is no such object.
field() { kubectl --namespace "$namespace" get "$1" "$2" --ignore-not-found --output "jsonpath=$3"; }
claim=state-$pod

# Selectors of the nodes that may have a volume, a line for each alternative.
readonly NODES_OF_VOLUME='{range .spec.nodeAffinity.required.nodeSelectorTerms[*]}{range .matchExpressions[?(@.operator=="In")]}'\
'{.key} in ({range .values[*]}{@},{end}),{end}{"\n"}{end}'

readonly READY='{.status.conditions[?(@.type=="Ready")].status}'

# "yes" if another node that is ready may have the pod's volume, "no" if there is none: mostly a folder or disk of its node.
volume_can_follow() {
  local volume selectors selector nodes other
  volume=$(field pvc "$claim" '{.spec.volumeName}')
  if [[ -z $volume ]]; then echo yes && return; fi
  if [[ -n $(field pv "$volume" '{.spec.hostPath.path}') ]]; then echo no && return; fi
  selectors=$(field pv "$volume" "$NODES_OF_VOLUME")
  if [[ -z $selectors ]]; then echo yes && return; fi
  while read -r selector; do
    selector=${selector//,)/)}
    nodes=$(kubectl get nodes --selector="${selector%,}" --output=name)
    for other in $nodes; do
      if [[ $other != "node/$node" && $(field node "${other#node/}" "$READY") == True ]]; then echo yes && return; fi
    done
  done <<<"$selectors"
  echo no
}

# ask QUESTION WORD: goes on if WORD is typed.
ask() {
  local answer=''
  if [[ $sure == yes ]]; then return; fi
  say "$1"
  read -r -p "Type $2 to go on: " answer || true
  if [[ $answer != "$2" ]]; then fail "nothing was changed"; fi
}

uid=$(field pod "$pod" '{.metadata.uid}')
if [[ -z $uid ]]; then fail "there is no pod $pod in the namespace $namespace"; fi
node=$(field pod "$pod" '{.spec.nodeName}')
if [[ -n $node ]]; then
  if [[ $(field node "$node" "$READY") == True ]]; then
    fail "node $node is ready: kubectl --namespace $namespace delete pod $pod drains lossd and starts it again"
  fi
fi
# Who would make the pod anew: without that, deleting it would be the end of it.
owner=$(field pod "$pod" '{.metadata.ownerReferences[?(@.kind=="StatefulSet")].name}')
if [[ -z $owner ]]; then fail "no StatefulSet made $pod, so it would not start again"; fi
replicas=$(field statefulset "$owner" '{.spec.replicas}')
first=$(field statefulset "$owner" '{.spec.ordinals.start}')
if ((${pod##*-} < ${first:-0} || ${pod##*-} >= ${first:-0} + ${replicas:-0})); then
  fail "the StatefulSet $owner does not ask for $pod (replicas: ${replicas:-it is gone}), so it would not start again"
fi
can_follow=$(volume_can_follow)
if [[ $new_volume == no && $can_follow == no ]]; then
  fail "no other node can have the volume of $pod. If the machine comes back, so do its checkpoints; else --new-volume begins without them"
fi

if [[ -n $node ]]; then
  ask "Is the machine of node $node off? If lossd still runs there, two of them will serve, and write to one volume." "$node"
fi
if [[ $new_volume == yes ]]; then
  if [[ $can_follow == yes ]]; then say "Other nodes can have the volume of $pod: without --new-volume it keeps its checkpoints."; fi
  ask "The claim $claim is deleted, and the checkpoints on its volume with it." "$claim"
fi

# A node that was deleted takes no taint; its pods are deleted with it.
if [[ -n $node && -n $(field node "$node" '{.metadata.name}') ]]; then
  kubectl taint node "$node" node.kubernetes.io/out-of-service=nodeshutdown:NoExecute --overwrite >&2
  say "Before node $node comes back into use, when nothing of it runs any more: kubectl taint node $node node.kubernetes.io/out-of-service-"
fi
if [[ $new_volume == yes ]]; then
  # Gone when the pod is, which it is made anew with.
  kubectl --namespace "$namespace" delete pvc "$claim" --ignore-not-found --wait=false >&2
fi
# Told of the taint, Kubernetes may have been faster.
if [[ $(field pod "$pod" '{.metadata.uid}') == "$uid" ]]; then
  kubectl --namespace "$namespace" delete pod "$pod" --ignore-not-found --force --grace-period=0 >&2
fi
SECONDS=0 patience=${LOSSD_PATIENCE_SECONDS:-600}
until now=$(field pod "$pod" '{.metadata.uid}') && [[ -n $now && $now != "$uid" ]]; do
  if ((SECONDS > patience)); then
    fail "$pod was not made anew within $patience s: kubectl --namespace $namespace describe statefulset $owner says why"
  fi
  sleep "${LOSSD_POLL_SECONDS:-2}"
done
say "$pod is made anew; waiting until it has restored its checkpoint"
if ! kubectl --namespace "$namespace" wait --for=condition=Ready "pod/$pod" --timeout=1h >&2; then
  fail "$pod is not ready yet: kubectl --namespace $namespace describe pod $pod says why"
fi
