package registry

import (
	"fmt"
	"math/big"
	"strings"
)

var sizeForm = lazily(`^([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([KMGTPE]?)(I?)B?$`)

// ParseSize reads a number of bytes as people write them: K, KB, KiB; upper and lower case alike; without a unit they
// are bytes.
func ParseSize(s string) (int64, error) {
	m := sizeForm().FindStringSubmatch(strings.ToUpper(strings.TrimSpace(s)))
	if m == nil || m[2] == "" && m[3] != "" {
		return 0, fmt.Errorf("is not a size")
	}
	base := int64(1000)
	if m[3] != "" {
		base = 1024
	}
	n, _ := new(big.Rat).SetString(m[1])
	for range strings.Index("KMGTPE", m[2]) + min(len(m[2]), 1) {
		n.Mul(n, big.NewRat(base, 1))
	}
	whole := new(big.Int).Div(n.Num(), n.Denom())
	if !whole.IsInt64() {
		return 0, fmt.Errorf("is larger than 2^63-1 bytes")
	}
	return whole.Int64(), nil
}

// PluginCapacity is GetCapacityResponse of CSI, in bytes.
type PluginCapacity struct {
	Available int64  `json:"available_bytes"`
	Maximum   *int64 `json:"maximum_volume_bytes,omitempty"` // of one volume; nil: not known
	Minimum   *int64 `json:"minimum_volume_bytes,omitempty"` // of one volume; nil: not known
}

// CapacityQuery selects the volumes that a plugin's capacity is for. The zero value selects all.
type CapacityQuery struct {
	Plugin     PluginID
	Parameters map[string]string // of the volumes (GetCapacityRequest.parameters)
	Topology   Topology          // that they must be accessible from (accessible_topology)
}
