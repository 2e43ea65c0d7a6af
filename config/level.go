package config

import "holdfast/registry"

// The levels of a job. Each lists the names that Nomad accepts there.
var (
	jobStanza = &stanza{
		name: "job",
		doc: "A job file has one job, or one task, which is a job of its own. Nomad's job files are read as they " +
			"are: what is not about CSI is passed on to the orchestrator as JSON.",
		fields: []field{
			{name: "id", kind: isText, doc: "The job's ID. Without it, the label of the block is the ID."},
			{name: "namespace", kind: isText, fallback: string(registry.DefaultNamespace),
				doc: "The namespace of the job and its volumes."},
			{name: "type", kind: isChoice, words: jobTypes, fallback: jobTypes[0],
				doc: "When the job runs, and on which nodes."},
			{name: "group", kind: isBlock, block: groupStanza,
				doc: "Tasks that run together on one node. Its label is its name."},
			{name: "task", kind: isBlock, block: taskStanza, doc: "A task directly in a job is a group with one task."},
		},
		carriedAttrs: []string{
			"all_at_once", "consul_token", "datacenters", "meta", "name", "node_pool", "priority", "region",
			"vault_token",
		},
		carriedBlocks: []string{
			"affinity", "constraint", "meta", "migrate", "multiregion", "parameterized", "periodic", "reschedule",
			"spread", "ui", "update", "vault",
		},
	}
	groupStanza = &stanza{
		name: "group",
		fields: []field{
			{name: "count", kind: isNumber, high: maxCount, fallback: int64(1),
				doc: "How many allocs of the group run."},
			{name: "volume", kind: isBlock, block: volumeStanza,
				doc: "A volume that the tasks may mount. Its label is its name in the group."},
			{name: "task", kind: isBlock, block: taskStanza, doc: "A task. Its label is its name."},
		},
		carriedAttrs: []string{
			"max_client_disconnect", "meta", "prevent_reschedule_on_lost", "shutdown_delay",
			"stop_after_client_disconnect",
		},
		carriedBlocks: []string{
			"affinity", "constraint", "consul", "disconnect", "ephemeral_disk", "meta", "migrate", "network",
			"reschedule", "restart", "scaling", "service", "spread", "update", "vault",
		},
	}
	taskStanza = &stanza{
		name: "task",
		fields: []field{
			{name: "driver", kind: isText, required: true, doc: "The task driver of the orchestrator."},
			{name: "env", kind: isMap, doc: "Environment variables."},
			{name: "config", kind: isBlock, doc: "The settings of the driver, passed on as they are written."},
			{name: "csi_plugin", kind: isBlock, block: pluginStanza, doc: "Makes the task a CSI plugin."},
			{name: "volume_mount", kind: isBlock, block: mountStanza, doc: "Mounts a volume of the group in the task."},
		},
		carriedAttrs: []string{"kill_signal", "kill_timeout", "kind", "leader", "meta", "shutdown_delay", "user"},
		carriedBlocks: []string{
			"action", "affinity", "artifact", "constraint", "consul", "dispatch_payload", "identity", "lifecycle",
			"logs", "meta", "resources", "restart", "scaling", "schedule", "secret", "service", "template", "vault",
		},
	}
)

// jobTypes lists the job types, the default first.
var jobTypes = []string{"service", "batch", "system", "sysbatch"}
