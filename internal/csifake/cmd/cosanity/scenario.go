package main

import (
	"slices"
	"time"

	"holdfast/internal/csifake"
)

// scenario is one kind of behaviour of the plugin.
type scenario struct {
	name, text string
	config     csifake.Config
	script     []csifake.Rule
	steps      string // steps for the orchestrator; empty: create two volumes, use each, and delete them
}

// changing are the RPCs of a volume's life that change something.
var changing = []string{"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
	"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume"}

// each returns a copy of the rules for each RPC that changes something.
func each(rules ...csifake.Rule) (all []csifake.Rule) {
	for _, rpc := range changing {
		for _, r := range rules {
			r.RPC = rpc
			all = append(all, r)
		}
	}
	return all
}

var (
	small    = []string{"CREATE_DELETE_VOLUME"}
	attached = append(small, "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME")
	every    = append(slices.Clone(csifake.AllCaps), "GET_VOLUME", "GET_SNAPSHOT", "SINGLE_NODE_MULTI_WRITER",
		"expansion/ONLINE")
	grouped = append(slices.Clone(every), "service/GROUP_CONTROLLER_SERVICE", "CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT")
)

// scenarios are listed in the best order for trying them.
var scenarios = []scenario{
	{"normal", "every capability, and no failure", csifake.Config{Caps: every}, nil,
		"also create and delete two snapshots of a volume, expand a volume and use it again, list volumes and " +
			"snapshots"},
	{"bare", "a plugin that neither attaches nor stages", csifake.Config{Caps: small}, nil, ""},
	{"staged", "a plugin that stages and does not attach",
		csifake.Config{Caps: append(small, "STAGE_UNSTAGE_VOLUME")}, nil, ""},
	{"unknown", "the plugin announces capabilities that no version of CSI has",
		csifake.Config{Caps: append(slices.Clone(attached), "controller/99", "node/99", "service/99")}, nil, ""},
	{"uncertain",
		"each change fails with DEADLINE_EXCEEDED after its effect, then with UNAVAILABLE, then with ABORTED",
		csifake.Config{Caps: attached}, each(
			csifake.Rule{Times: 1, When: csifake.After, Code: "DEADLINE_EXCEEDED"},
			csifake.Rule{Nth: 2, Times: 1, Code: "UNAVAILABLE"},
			csifake.Rule{Nth: 3, Times: 1, Code: "ABORTED"}), ""},
	{"internal", "each call that changes something fails once with INTERNAL after its effect",
		csifake.Config{Caps: attached}, each(csifake.Rule{Times: 1, When: csifake.After, Code: "INTERNAL"}), ""},
	{"cut", "the connection is cut once before the effect of each call, and once after it",
		csifake.Config{Caps: attached}, each(csifake.Rule{Times: 1, Drop: true},
			csifake.Rule{Nth: 2, Times: 1, When: csifake.After, Drop: true}), ""},
	{"slow", "each call that changes something takes 3 s", csifake.Config{Caps: attached},
		each(csifake.Rule{Delay: csifake.Duration(3 * time.Second)}), ""},
	{"crash", "the plugin dies once after the effect of NodeStageVolume, and once before NodeUnpublishVolume",
		csifake.Config{Caps: attached}, []csifake.Rule{
			{RPC: "NodeStageVolume", Times: 1, When: csifake.After, Crash: true},
			{RPC: "NodeUnpublishVolume", Times: 1, Crash: true}}, ""},
	{"late", "the plugin is not ready at the first three probes", csifake.Config{Caps: attached},
		[]csifake.Rule{{RPC: "Probe", Times: 3, NotReady: true}}, ""},
	{"lists", "lists have pages of one entry", csifake.Config{Caps: every, Page: 1}, nil,
		"also create two snapshots of a volume, list volumes and snapshots of the plugin, delete the snapshots"},
	{"ids", "the IDs of volumes are paths", csifake.Config{Caps: attached, IDs: csifake.IDSlashes}, nil, ""},
	{"limit", "the node takes one volume", csifake.Config{Caps: attached, MaxVolumes: 1}, nil, ""},
	{"topology", "the node and its volumes are in zone z1",
		csifake.Config{Caps: append(slices.Clone(attached), "TOPOLOGY"), Topology: map[string]string{"zone": "z1"}},
		nil, ""},
	{"offline", "volumes are expanded while they are not in use",
		csifake.Config{Caps: append(slices.Clone(attached), "EXPAND_VOLUME", "expansion/OFFLINE")}, nil,
		"also expand a volume while no workload uses it, and use it again"},
	{"name", "the plugin has a name that CSI forbids: it must get no volumes",
		csifake.Config{Caps: attached, Name: "not/a name"}, nil, "try to create a volume, which has to fail"},
	{"secrets", "a plugin that attaches and stages volumes", csifake.Config{Caps: attached}, nil,
		"give each volume secrets for every call (of a StorageClass, volume file or the like) under the keys user " +
			"and api-key_1"},
	{"readers", "the plugin attaches volumes and lacks PUBLISH_READONLY", csifake.Config{Caps: attached}, nil,
		"create a third volume of access mode SINGLE_NODE_READER_ONLY, use it in a workload that only reads, delete " +
			"it"},
	{"denied", "the plugin has a volume with the ID existing, and confirms no capability for it",
		csifake.Config{Caps: attached, Volumes: []string{"existing"}},
		[]csifake.Rule{{RPC: "ValidateVolumeCapabilities", Unconfirmed: true}},
		"register the volume with the ID existing (static provisioning); if that succeeds, use it in a workload"},
	{"groups", "a group snapshot is ready when the plugin is asked for it the second time",
		csifake.Config{Caps: grouped}, []csifake.Rule{{RPC: "CreateVolumeGroupSnapshot", NotReady: true},
			{RPC: "GetVolumeGroupSnapshot", Times: 1, NotReady: true}},
		"also take a group snapshot of both volumes, wait until it is ready, and delete it"},
	{"blocks", "the plugin lists blocks of snapshots, and the first list is cut off",
		csifake.Config{Caps: append(slices.Clone(every), "service/SNAPSHOT_METADATA_SERVICE")},
		[]csifake.Rule{{RPC: "GetMetadataAllocated", Times: 1, When: csifake.After, Drop: true}},
		"also create two snapshots of a volume, list the blocks of the first and those in which they differ, delete " +
			"both"},
}
