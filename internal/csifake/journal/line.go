package journal

import "time"

// Kind is the kind of a line.
type Kind string

const (
	Start     Kind = "start"     // a plugin started: a new run of its instance
	Begin     Kind = "begin"     // a call arrived
	Abandoned Kind = "abandoned" // the caller is gone: cancelled, past its deadline, or its connection was lost
	End       Kind = "end"       // the call has ended, and its answer is about to be sent
	Stop      Kind = "stop"      // the plugin ended; a killed process writes no such line
	Reboot    Kind = "reboot"    // written by a test: all mounts of Node are gone, nothing is staged or published there
	Forgot    Kind = "forgot"    // the plugin has lost its records; its mounts stay
)

// Line is one line of a journal. Empty fields are left out.
type Line struct {
	Kind     Kind      `json:"kind"`
	Seq      uint64    `json:"seq"`            // number of the line within its run, from 1
	Run      string    `json:"run"`            // one start of one plugin
	Call     uint64    `json:"call,omitempty"` // number of the call within its run, from 1
	Wall     time.Time `json:"wall"`
	Mono     int64     `json:"mono"` // CLOCK_MONOTONIC in nanoseconds, the same clock in every process of the machine
	PID      int       `json:"pid,omitempty"`
	Plugin   string    `json:"plugin,omitempty"`
	Instance string    `json:"instance,omitempty"`
	Role     string    `json:"role,omitempty"` // identity, controller, group, metadata or node: the service called

	RPC            string   `json:"rpc,omitempty"`
	Volume         string   `json:"volume,omitempty"`
	Name           string   `json:"name,omitempty"`      // of the volume or snapshot to create
	Snapshot       string   `json:"snapshot,omitempty"`  // snapshot_id or target_snapshot_id
	Volumes        []string `json:"volumes,omitempty"`   // source_volume_ids of a group snapshot
	Group          string   `json:"group,omitempty"`     // group_snapshot_id
	Base           string   `json:"base,omitempty"`      // base_snapshot_id
	Snapshots      []string `json:"snapshots,omitempty"` // snapshot_ids of a group snapshot
	Node           string   `json:"node,omitempty"`      // controller: node_id of the request; node: the plugin's own
	Staging        string   `json:"staging,omitempty"`
	Target         string   `json:"target,omitempty"`
	Path           string   `json:"path,omitempty"`  // volume_path of stats, health and expand
	Bytes          int64    `json:"bytes,omitempty"` // required_bytes of an expansion
	Hash           string   `json:"hash,omitempty"`  // of the request without its secrets
	Usage          string   `json:"usage,omitempty"`
	ReadOnly       bool     `json:"readonly,omitempty"`
	PublishContext string   `json:"publish_context,omitempty"` // hash; empty for an empty map
	VolumeContext  string   `json:"volume_context,omitempty"`  // hash; empty for an empty map
	SecretKeys     []string `json:"secret_keys,omitempty"`     // never a value
	Usages         []string `json:"usages,omitempty"`          // of a request with several volume capabilities
	// Source is the source of a new volume: "snapshot <id>" or "volume <id>".
	Source     string   `json:"source,omitempty"`
	Mutable    []string `json:"mutable,omitempty"`     // names of mutable_parameters, sorted
	Token      string   `json:"token,omitempty"`       // starting_token
	Ephemeral  bool     `json:"ephemeral,omitempty"`   // volume_context asks for an ephemeral inline volume
	MountGroup bool     `json:"mount_group,omitempty"` // volume_mount_group is set
	// Topology means that accessibility_requirements or accessible_topology is set.
	Topology bool `json:"topology,omitempty"`
	// Over has the fields that are longer than CSI allows: "name: 129 bytes".
	Over   []string `json:"over,omitempty"`
	Look   *Look    `json:"look,omitempty"`
	Flight int      `json:"flight,omitempty"` // calls running in this plugin as this one began, itself included
	Beside []uint64 `json:"beside,omitempty"` // calls for the same volume that ran as this one arrived
	Peer   int      `json:"peer,omitempty"`   // process id of the caller
	Conn   uint64   `json:"conn,omitempty"`   // number of the connection within the run

	Code   string  `json:"code,omitempty"`     // name of the gRPC code as the CSI spec writes it
	Effect bool    `json:"effect,omitempty"`   // the requested state exists now, whatever the code says
	Answer *Answer `json:"answered,omitempty"` // what the answer tells the caller
	Lost   bool    `json:"lost,omitempty"`     // no caller can read the answer: it is too long, or no valid protobuf
	Killed bool    `json:"killed,omitempty"`

	Endpoint string `json:"endpoint,omitempty"` // of a start: CSI_ENDPOINT as it was given
}

// Look has the lstat types of the paths in a request when it arrived: "absent", "dir", "file", "link", "device",
// "other" or "error". It is empty if the plugin did not look.
type Look struct {
	Staging string `json:"staging,omitempty"`
	Target  string `json:"target,omitempty"`
	Parent  string `json:"parent,omitempty"` // of the target
}

// Answer has the parts of a reply that a caller needs for later calls, as they were sent.
type Answer struct {
	Volume         string   `json:"volume,omitempty"`
	VolumeContext  string   `json:"volume_context,omitempty"`
	PublishContext string   `json:"publish_context,omitempty"`
	Node           string   `json:"node,omitempty"`
	Caps           []string `json:"caps,omitempty"`
	NodeExpand     bool     `json:"node_expand,omitempty"`
	Bytes          int64    `json:"bytes,omitempty"` // size of a volume after its expansion
	Ready          *bool    `json:"ready,omitempty"`

	Name       string              `json:"name,omitempty"` // of the provider
	Snapshot   string              `json:"snapshot,omitempty"`
	Group      string              `json:"group,omitempty"`
	Snapshots  []string            `json:"snapshots,omitempty"`   // of a group snapshot
	Next       string              `json:"next,omitempty"`        // token of the next page
	MaxVolumes int64               `json:"max_volumes,omitempty"` // of the node
	Expansion  []string            `json:"expansion,omitempty"`   // ONLINE, OFFLINE
	Segments   []map[string]string `json:"segments,omitempty"`    // topology of the node or the new volume
	Denied     []string            `json:"denied,omitempty"`      // requested usages that were not confirmed
}

// Call is one call with its begin and its end.
type Call struct {
	Line            // the line of its begin
	Abandoned bool  // the caller was gone before the answer
	End       *Line // nil: the call has not ended
}

// Calls pairs begins with their ends, in the order of the begins.
func Calls(lines []Line) []Call {
	var calls []Call
	at := map[callID]int{}
	for i, l := range lines {
		id := callID{l.Run, l.Call}
		n, known := at[id]
		switch {
		case l.Kind == Begin:
			at[id] = len(calls)
			calls = append(calls, Call{Line: l})
		case l.Kind == Abandoned && known:
			calls[n].Abandoned = true
		case l.Kind == End && known:
			calls[n].End = &lines[i]
		}
	}
	return calls
}

type callID struct {
	run  string
	call uint64
}
