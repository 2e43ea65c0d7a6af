package csi

import (
	"context"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// meet has the plugin say what it is in the instance's role before anything else is asked over a connection that was made since it last did:
// another process may listen at the socket (CSI: capabilities are learnt before anything that depends on them). One that is not what is
// registered is not asked: its supervisor registers it anew at its next heartbeat.
// It returns the number of the connection over which the plugin has said it.
func (c *Conn) meet(ctx context.Context, in registry.Instance) (line uint64, err error) {
	if err := c.ready(ctx); err != nil {
		return 0, err
	}
	if line, met := c.hasMet(in.Role); met {
		return line, nil
	}
	said, err := c.describe(ctx, []registry.Role{in.Role})
	if err != nil {
		return 0, status.Error(codes.Unavailable, "the plugin has come back, and does not say what it is: "+err.Error())
	}
	if !alike(said[in.Role], in.Fingerprint) {
		c.forgetMet(in.Role)
		return 0, status.Error(codes.Unavailable, "the plugin has come back as another one; it is asked for this once it is registered as such")
	}
	line, _ = c.hasMet(in.Role)
	return line, nil
}

// alike says whether two fingerprints are of one plugin, which can do the same.
func alike(now, was registry.Fingerprint) bool {
	return now.Provider == was.Provider && now.NodeID == was.NodeID && slices.Equal(now.Capabilities, was.Capabilities)
}

// Greet connects to the plugin of a task before it is needed, and has it say what it is in the roles of its instances, which are given. A plugin
// that is another one than they say keeps no connection: it is met when it is called, or is registered anew by its supervisor.
func (f *Fleet) Greet(ctx context.Context, t registry.TaskKey, instances []registry.Instance) error {
	c, err := f.Open(instances[0].Plugin, t, instances[0].Endpoint)
	if err != nil {
		return err
	}
	var roles []registry.Role
	for _, in := range instances {
		roles = append(roles, in.Role)
	}
	for again := true; again; {
		began := time.Now()
		_, err = c.Probe(ctx)
		again = err != nil && ctx.Err() == nil && time.Since(began) >= dialLimit // who gives way to others may have had no processor meanwhile
	}
	said, untold := c.Describe(ctx, roles)
	other := slices.ContainsFunc(instances, func(in registry.Instance) bool { return !alike(said[in.Role], in.Fingerprint) })
	if err != nil || untold != nil || other {
		f.Close(t)
	}
	return err
}

// hasMet is the number of the connection over which the plugin has said what it is in the role, and whether that is still the newest.
func (c *Conn) hasMet(r registry.Role) (line uint64, met bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, asked := c.met[r]
	return at, asked && at == c.made.Load()
}

func (c *Conn) hasSaid(roles []registry.Role, made uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.met == nil {
		c.met = map[registry.Role]uint64{}
	}
	for _, r := range roles {
		c.met[r] = made
	}
}

func (c *Conn) forgetMet(r registry.Role) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.met, r)
}
