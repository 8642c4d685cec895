{{- define "hybridkv.labels" -}}
{app.kubernetes.io/name: hybridkv, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}

{{- /* Values that each are right, and not together. */}}
{{- define "hybridkv.check" -}}
{{- if and (eq .Values.mode "sidecar") (eq (int .Values.engine.replicas) 0) }}
{{- fail "mode: \"sidecar\" is a daemon in each pod of the engine, and there is no engine: engine.replicas: 1 works" }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") .Values.disk }}
{{- fail "disk: a directory of the node is for mode: \"daemonset\"; sidecars of one node would have one name there" }}
{{- end }}
{{- if and (eq .Values.mode "sidecar") .Values.tiers (gt (int .Values.engine.replicas) 1) }}
{{- fail "tiers: sidecars of one node would have one name there: engine.replicas: 1 works, or mode: \"daemonset\"" }}
{{- end }}
{{- if and .Values.metrics.enabled (not .Values.metrics.tokenSecret.name) }}
{{- fail "metrics.enabled needs a token: metrics.tokenSecret.name is the name of the secret that has it" }}
{{- end }}
{{- if and .Values.metrics.podMonitor.enabled (not .Values.metrics.enabled) }}
{{- fail "metrics.podMonitor.enabled: Prometheus can reach no loopback: metrics.enabled: true works" }}
{{- end }}
{{- end }}

{{- /* .Values.ram in MiB */}}
{{- define "hybridkv.ramMiB" -}}
{{- $number := regexFind "^[0-9]+" .Values.ram | int64 -}}
{{- $unit := regexFind "[MGT]iB$" .Values.ram -}}
{{- mul $number (get (dict "MiB" 1 "GiB" 1024 "TiB" 1048576) $unit) -}}
{{- end }}

{{- /* The memory of the cache's files in MiB: its tables are a 64th at most. */}}
{{- define "hybridkv.filesMiB" -}}
{{- $ram := include "hybridkv.ramMiB" . | int64 -}}
{{- add $ram (div (add $ram 63) 64) -}}
{{- end }}

{{- /* With a GiB for the daemon, and 2 GiB for the table of six million files below RAM. */}}
{{- define "hybridkv.limitMiB" -}}
{{- add (include "hybridkv.filesMiB" . | int64) 1024 (ternary 2048 0 (not (empty .Values.disk))) -}}
{{- end }}

{{- /* MiB in the largest unit that is whole: 66560 -> 65Gi */}}
{{- define "hybridkv.quantity" -}}
{{- if eq (mod . 1024) 0 }}{{ div . 1024 }}Gi{{ else }}{{ . }}Mi{{ end -}}
{{- end }}

{{- define "hybridkv.socket" -}}
/run/hybridkv/own/daemon.sock
{{- end }}

{{- define "hybridkv.podSecurityContext" -}}
runAsUser: {{ int64 .Values.uid }}
runAsGroup: {{ int64 .Values.gid }}
fsGroup: {{ int64 .Values.gid }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* What engine and daemon share. */}}
{{- define "hybridkv.sharedMounts" -}}
- {name: socket, mountPath: /run/hybridkv}
- {name: memory, mountPath: /hybridkv}
{{- end }}

{{- define "hybridkv.transferConfig" -}}
{"kv_connector": "HybridKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"server": "unix://{{ include "hybridkv.socket" . }}"}}
{{- end }}

{{- /* An engine's volumes where each node has a daemon. */}}
{{- define "hybridkv.engineVolumes" -}}
- name: socket
  hostPath: {path: {{ .Values.directories.socket }}, type: Directory}
- name: memory
  hostPath: {path: {{ .Values.directories.memory }}, type: Directory}
{{- end }}

{{- define "hybridkv.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- /* What both kinds of pods have. */}}
{{- define "hybridkv.pod" -}}
# Services of a namespace would set variables like HYBRIDKV_METRICS_PORT.
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "hybridkv.podSecurityContext" . | nindent 2 }}
{{- end }}

{{- /* Volumes of the daemon alone. */}}
{{- define "hybridkv.daemonVolumes" -}}
{{- with .Values.disk }}
- name: disk
  hostPath: {path: {{ .path }}, type: DirectoryOrCreate}
{{- end }}
{{- if .Values.metrics.enabled }}
- name: token
  secret:
    secretName: {{ .Values.metrics.tokenSecret.name }}
    defaultMode: 0440
    items: [{key: {{ .Values.metrics.tokenSecret.key }}, path: token}]
{{- end }}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The daemon's container. As a sidecar it has a startup probe, as others wait for that one. */}}
{{- define "hybridkv.container" -}}
{{- $ping := printf "exec: {command: [hybridkv, ping, --socket, %s]}" (include "hybridkv.socket" .) -}}
name: hybridkv
{{ include "hybridkv.image" . }}
{{- if eq .Values.mode "sidecar" }}
# A container that is restarted always is a sidecar: it starts before the engine and ends after it.
restartPolicy: Always
{{- end }}
args:
  - serve
  - --socket={{ include "hybridkv.socket" . }}
  - --shm-dir=/hybridkv
  - --ram={{ .Values.ram }}
  - --node=$(NODE_NAME)
  {{- with .Values.disk }}
  - --disk=/var/lib/hybridkv
  {{- with .bytes }}
  - --disk-bytes={{ . }}
  {{- end }}
  {{- end }}
  {{- range .Values.tiers }}
  - {{ printf "--tier=%s" . | quote }}
  {{- end }}
  {{- if .Values.metrics.enabled }}
  - --metrics-host=0.0.0.0
  - --metrics-port={{ .Values.metrics.port }}
  - --metrics-token=file:/etc/hybridkv/token
  {{- end }}
  {{- range .Values.args }}
  - {{ . | quote }}
  {{- end }}
env:
  - name: NODE_NAME
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.metrics.enabled }}
ports:
  - {name: metrics, containerPort: {{ .Values.metrics.port }}}
{{- end }}
{{ ternary "startupProbe" "readinessProbe" (eq .Values.mode "sidecar") }}:
  {{ $ping }}
# A daemon that answers nobody for a minute is started again, and takes its memory over.
livenessProbe:
  {{ $ping }}
  timeoutSeconds: 10
  failureThreshold: 6
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  runAsNonRoot: {{ ne (int64 .Values.uid) 0 }}
# Pages of the cache count for the container that touched them first: the daemon.
{{- with .Values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- else }}
{{- $limit := include "hybridkv.quantity" (include "hybridkv.limitMiB" . | int64) }}
resources:
  requests: {memory: {{ $limit }}}
  limits: {memory: {{ $limit }}}
{{- end }}
volumeMounts:
  {{- include "hybridkv.sharedMounts" . | nindent 2 }}
  {{- if .Values.disk }}
  - {name: disk, mountPath: /var/lib/hybridkv}
  {{- end }}
  {{- if .Values.metrics.enabled }}
  - {name: token, mountPath: /etc/hybridkv, readOnly: true}
  {{- end }}
  {{- with .Values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
