package config

// level lists the names that Nomad accepts at one level of a job. Names outside CSI are carried.
type level struct {
	name          string
	attrs, blocks []string
}

var (
	jobLevel = level{
		name: "job",
		attrs: []string{
			"all_at_once", "consul_token", "datacenters", "id", "meta", "name", "namespace", "node_pool", "priority",
			"region",
			"type", "vault_token",
		},
		blocks: []string{
			"affinity", "constraint", "group", "meta", "migrate", "multiregion", "parameterized", "periodic",
			"reschedule", "spread",
			"task", "ui", "update", "vault",
		},
	}
	groupLevel = level{
		name: "group",
		attrs: []string{
			"count", "max_client_disconnect", "meta", "prevent_reschedule_on_lost", "shutdown_delay",
			"stop_after_client_disconnect",
		},
		blocks: []string{
			"affinity", "constraint", "consul", "disconnect", "ephemeral_disk", "meta", "migrate", "network",
			"reschedule", "restart",
			"scaling", "service", "spread", "task", "update", "vault", "volume",
		},
	}
	taskLevel = level{
		name: "task",
		attrs: []string{
			"driver", "env", "kill_signal", "kill_timeout", "kind", "leader", "meta", "shutdown_delay", "user",
		},
		blocks: []string{
			"action", "affinity", "artifact", "config", "constraint", "consul", "csi_plugin", "dispatch_payload", "env",
			"identity",
			"lifecycle", "logs", "meta", "resources", "restart", "scaling", "schedule", "secret", "service", "template",
			"vault",
			"volume_mount",
		},
	}
)

// jobTypes lists the job types, the default first.
var jobTypes = []string{"service", "batch", "system", "sysbatch"}
