package registry

import "testing"

func TestCallErrorNamesThePlugin(t *testing.T) {
	at := InstanceKey{RoleNode, "p", "12345678-9abc", "t"}
	for want, e := range map[string]CallError{
		"plugin p (alloc 12345678): NodeStageVolume failed: INTERNAL: no": {RPC: NodeStageRPC, Instance: at,
			Code: "INTERNAL", Detail: "no"},
		"plugin p (alloc 12345678): NodeStageVolume got no answer: lost": {RPC: NodeStageRPC, Instance: at,
			Detail: "lost"},
		"NodeStageVolume: UNAVAILABLE: none is registered": {RPC: NodeStageRPC, Code: "UNAVAILABLE",
			Detail: "none is registered"},
	} {
		if got := e.Error(); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	}
}

func TestWaitInOneLine(t *testing.T) {
	disk := VolumeName{"default", "disk"}
	for want, w := range map[string]Wait{
		"volume disk is not staged yet: plugin p: NodeStageVolume failed: UNAVAILABLE: backend is down": {
			Volume: disk, Step: StepStage, For: "plugin p", RPC: NodeStageRPC, Code: "UNAVAILABLE",
			Detail: "backend is down", Attempt: 3,
		},
		"volume mine/disk is not detached yet: waiting for plugin p to answer ControllerUnpublishVolume": {
			Volume: VolumeName{"mine", "disk"}, Step: StepDetach, For: "plugin p", RPC: ControllerUnpublishRPC,
		},
		"volume disk is not published yet: plugin p: NodePublishVolume got no answer: the connection was lost": {
			Volume: disk, Step: StepPublish, For: "plugin p", RPC: NodePublishRPC, Detail: "the connection was lost",
		},
		"volume disk is not created yet: plugin p: CreateVolume failed: INTERNAL: no": {
			Volume: disk, For: "plugin p", RPC: CreateVolumeRPC, Code: "INTERNAL", Detail: "no",
		},
		"volume disk is not attached yet: its secrets cannot be had": {Volume: disk, Step: StepAttach,
			Detail: "its secrets cannot be had"},
		"volume disk waits for its claim": {Volume: disk, Step: StepClaim},
		"volume disk is held by alloc a": {Volume: disk, Step: StepClaim,
			Detail: "volume disk is held by alloc a"},
		"volume disk waits for plugin p to be healthy": {Volume: disk, Step: StepPlugin,
			For: "plugin p to be healthy"},
		"volume disk waits for its turn: a mount for alloc a": {Volume: disk, Step: StepTurn,
			For: "a mount for alloc a"},
		"the volume of request \"r\" waits: its name is none": {Request: "r", Detail: "its name is none"},
	} {
		if got := w.String(); got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	}
}
