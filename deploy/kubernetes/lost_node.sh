#!/usr/bin/env bash
# Starts the lossd of a node that is lost on another one.
set -euo pipefail

usage() {
  cat <<END
usage: deploy/kubernetes/lost_node.sh [--namespace NAME] [--new-volume] [--yes] POD

A pod of a StatefulSet whose node no longer answers stays Terminating, and its volume attached to that node: Kubernetes cannot know whether
lossd still runs there. Once you do know (the machine is off, or gone), this tells Kubernetes so, by the node's taint
node.kubernetes.io/out-of-service, and waits until the pod is ready on another node. It restores its newest checkpoint.

  --namespace   where the pod is (default: lossd)
  --new-volume  begin with an empty volume: for one that was on the node itself. Its checkpoints are lost
  --yes         do not ask whether the machine is off

Nothing is changed while the node is ready. Needs kubectl, and the right to taint nodes and to delete pods (with --new-volume, claims).
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

# A volume that only its node has cannot follow the pod.
volume_is_on_the_node() {
  local volume
  volume=$(field pvc "$claim" '{.spec.volumeName}')
  [[ -n $volume && $(field pv "$volume" '{.spec.nodeAffinity.required.nodeSelectorTerms[*].matchExpressions[*].key}') == *kubernetes.io/hostname* ]]
}

ask_whether_it_is_off() {
  local answer=''
  if [[ $sure == yes ]]; then return; fi
  say "Is the machine of node $node off? If lossd still runs there, two of them will serve, and write to one volume."
  read -r -p "Type the node's name to go on: " answer || true
  if [[ $answer != "$node" ]]; then fail "nothing was changed"; fi
}

uid=$(field pod "$pod" '{.metadata.uid}')
if [[ -z $uid ]]; then fail "there is no pod $pod in the namespace $namespace"; fi
node=$(field pod "$pod" '{.spec.nodeName}')
if [[ -n $node ]]; then
  ready=$(field node "$node" '{.status.conditions[?(@.type=="Ready")].status}')
  if [[ $ready == True ]]; then
    fail "node $node is ready: kubectl --namespace $namespace delete pod $pod drains lossd and starts it again"
  fi
fi
if [[ $new_volume == no ]] && volume_is_on_the_node; then
  fail "the volume of $pod is on the node itself. If the machine comes back, so do its checkpoints; else --new-volume begins without them"
fi

if [[ -n $node ]]; then
  ask_whether_it_is_off
  # A node that was deleted takes no taint; its pods are deleted with it.
  if [[ -n $(field node "$node" '{.metadata.name}') ]]; then
    kubectl taint node "$node" node.kubernetes.io/out-of-service=nodeshutdown:NoExecute --overwrite >&2
  fi
fi
if [[ $new_volume == yes ]]; then
  # Gone when the pod is, which it is made anew with.
  kubectl --namespace "$namespace" delete pvc "$claim" --ignore-not-found --wait=false >&2
fi
# Told of the taint, Kubernetes may have been faster.
if [[ $(field pod "$pod" '{.metadata.uid}') == "$uid" ]]; then
  kubectl --namespace "$namespace" delete pod "$pod" --ignore-not-found --force --grace-period=0 >&2
fi
until now=$(field pod "$pod" '{.metadata.uid}') && [[ -n $now && $now != "$uid" ]]; do sleep "${LOSSD_POLL_SECONDS:-2}"; done
say "$pod is made anew; waiting until it has restored its checkpoint"
kubectl --namespace "$namespace" wait --for=condition=Ready "pod/$pod" --timeout=1h >&2
if [[ -n $node ]]; then
  say "Before node $node comes back into use, when nothing of it runs any more: kubectl taint node $node node.kubernetes.io/out-of-service-"
fi
