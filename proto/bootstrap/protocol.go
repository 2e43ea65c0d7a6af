package bootstrap

import (
	"context"
	"slices"

	plugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
)

const (
	// CookieKey and CookieValue show a shim that a Holdfast host started it. They are not secret.
	CookieKey   = "HOLDFAST_SHIM"
	CookieValue = "b1b5d3c0-holdfast-shim"

	// LifeFD is the variable with the number of the life pipe's descriptor. End of file means that the host is gone.
	LifeFD = "HOLDFAST_LIFE_FD"

	// MaxMessage bounds one gRPC message in either direction, in bytes, at both ends.
	MaxMessage = 16 << 20

	// Window is how much of a stream is sent before the receiver reads it, in bytes. A fixed window spares each call
	// the pings by which gRPC otherwise measures the connection.
	Window = 1 << 20

	// Workers is the number of goroutines that a gRPC server keeps for calls. Each has the stack that earlier calls
	// needed; the stack of a new goroutine grows, and is copied, several times within one call. Calls beyond that
	// number get new goroutines.
	Workers = 32

	// PluginName is the one plugin that host and shim exchange.
	PluginName = "holdfast"

	// ExitNotAPlugin is the exit code of a shim that was not started by a Holdfast host.
	ExitNotAPlugin = 64
)

// Versions lists the protocol versions that this build speaks, lowest first.
func Versions() []int { return slices.Clone(versions) }

// Handshake returns the go-plugin handshake of both sides.
func Handshake() plugin.HandshakeConfig {
	return plugin.HandshakeConfig{MagicCookieKey: CookieKey, MagicCookieValue: CookieValue}
}

// Client returns the host's plugin sets by protocol version. PluginName dispenses the *grpc.ClientConn.
func Client() map[int]plugin.PluginSet { return pluginSets(versions, shimPlugin{}) }

func pluginSets(versions []int, p shimPlugin) map[int]plugin.PluginSet {
	sets := make(map[int]plugin.PluginSet, len(versions))
	for _, v := range versions {
		sets[v] = plugin.PluginSet{PluginName: p}
	}
	return sets
}

// shimPlugin is the plugin that a host dispenses and a shim serves.
type shimPlugin struct {
	plugin.NetRPCUnsupportedPlugin
	register func(*grpc.Server) error // registers the shim's services; nil at the host
}

func (p shimPlugin) GRPCServer(_ *plugin.GRPCBroker, s *grpc.Server) error { return p.register(s) }

func (shimPlugin) GRPCClient(_ context.Context, _ *plugin.GRPCBroker, conn *grpc.ClientConn) (any, error) {
	return conn, nil
}
