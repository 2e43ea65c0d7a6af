package registry

// InfeasibleKind is a kind of reason why a node cannot mount a volume now. The set is closed, so programs may switch
// over it.
type InfeasibleKind string

const (
	// InfeasibleRequest: the request contradicts itself. No node can take it.
	InfeasibleRequest InfeasibleKind = "invalid request"
	// InfeasibleNoVolume: no volume has that ID in the namespace.
	InfeasibleNoVolume InfeasibleKind = "unknown volume"
	// InfeasibleNotReady: the volume is being created or deleted, its creation is uncertain, or it is an inline volume
	// of another alloc.
	InfeasibleNotReady InfeasibleKind = "volume not ready"
	// InfeasibleUnsupported: the volume or its plugin does not support the access mode, attachment mode or mount group.
	InfeasibleUnsupported InfeasibleKind = "unsupported"
	// InfeasibleClaimed: claims of other allocs exclude the request. Holders lists them.
	InfeasibleClaimed InfeasibleKind = "claimed"
	// InfeasibleTopology: the volume is not accessible from the node.
	InfeasibleTopology InfeasibleKind = "topology"
	// InfeasibleLimit: the node has as many volumes of the plugin as it may have (max_volumes_per_node). Holders lists
	// the claims on these volumes.
	InfeasibleLimit InfeasibleKind = "volume limit"
	// InfeasibleNoPlugin: no task of the plugin serves a needed role here.
	InfeasibleNoPlugin InfeasibleKind = "no plugin"
	// InfeasibleUnhealthy: the plugin is not healthy in a needed role.
	InfeasibleUnhealthy InfeasibleKind = "plugin unhealthy"
	// InfeasibleNotFormed: the expected nodes of the cluster have not all registered yet.
	InfeasibleNotFormed InfeasibleKind = "cluster not formed"
	// InfeasibleNode: the node takes no claims: it is draining, out of service or fenced.
	InfeasibleNode InfeasibleKind = "node takes no claims"
)

var infeasibleErrors = map[InfeasibleKind]error{
	InfeasibleRequest: ErrInvalid, InfeasibleNoVolume: ErrNotFound, InfeasibleNotReady: ErrConflict,
	InfeasibleUnsupported: ErrUnsupported, InfeasibleClaimed: ErrConflict, InfeasibleTopology: ErrUnsupported,
	InfeasibleLimit: ErrExhausted, InfeasibleNoPlugin: ErrUnavailable, InfeasibleUnhealthy: ErrUnavailable,
	InfeasibleNotFormed: ErrUnavailable, InfeasibleNode: ErrUnavailable,
}

// Infeasible is one reason why a node cannot mount the volume of a request now.
type Infeasible struct {
	Request RequestName    `json:"request"`
	Volume  VolumeName     `json:"volume,omitzero"`
	Plugin  PluginID       `json:"plugin,omitempty"`
	Kind    InfeasibleKind `json:"kind"`
	Detail  string         `json:"detail"`            // one line, for people
	Holders []Claim        `json:"holders,omitempty"` // of InfeasibleClaimed and InfeasibleLimit
}

// Err returns the reason as an error of the kind with which PrepareAlloc fails.
func (i Infeasible) Err() error { return Errorf(infeasibleErrors[i.Kind], "%s", i.Detail) }
