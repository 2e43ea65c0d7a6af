package node

import (
	"context"
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
)

// leftover is a volume that is staged or attached without a claim.
type leftover struct {
	volume           registry.VolumeKey
	name             registry.VolumeName
	staged, attached bool // on this node
}

// TakeDownUnclaimed starts the release of volumes that are staged or attached without a claim. The release continues in
// the background until it is done or the volume is claimed.
func (a *Allocs) TakeDownUnclaimed(ctx context.Context) error {
	var unclaimed []leftover
	err := a.State.View(ctx, func(v registry.View) error {
		seen := map[registry.VolumeKey]bool{}
		add := func(key registry.VolumeKey) {
			if l, is := a.leftoverOf(v, key); is && !seen[key] {
				seen[key] = true
				unclaimed = append(unclaimed, l)
			}
		}
		for _, p := range v.Stagings() {
			add(p.Volume)
		}
		for _, at := range v.AllAttachments() {
			add(at.Volume)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("load staged and attached volumes: %w", err)
	}
	for _, l := range unclaimed {
		a.takeDownUnclaimed(l)
	}
	return nil
}

// leftoverOf returns how the volume is still used on this node. unclaimed reports whether it is staged or attached, and
// not published or claimed on this node.
func (a *Allocs) leftoverOf(v registry.View, key registry.VolumeKey) (l leftover, unclaimed bool) {
	p, _ := v.Staging(key)
	at, attached := v.Attachment(registry.AttachmentKey{Volume: key, Node: a.host.Node})
	l = leftover{volume: key, name: p.Name, staged: p.State != registry.MarkNone, attached: attached}
	if attached {
		l.name = at.Name
	}
	claimed := slices.ContainsFunc(v.Claims(key), func(c registry.Claim) bool { return c.Node == a.host.Node })
	return l, (l.staged || l.attached) && !claimed && len(v.Refs(key)) == 0
}

// takeDownUnclaimed starts the release of one volume, unless such a release runs already. The release is retried until
// it succeeds or the volume is claimed.
func (a *Allocs) takeDownUnclaimed(l leftover) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.unclaimed[l.volume] {
		return
	}
	a.unclaimed[l.volume] = a.workers.start(func(ctx context.Context) {
		log := a.logger.With("volume", l.name.String())
		persist(ctx, log, "cannot release a volume without a claim yet", func(time.Duration) error {
			req := &request{Allocs: a, key: registry.ClaimKey{Volume: l.volume}, name: l.name}
			return req.releaseUnclaimed(ctx)
		})
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.unclaimed, l.volume)
	})
}

// releaseUnclaimed unstages and detaches a volume that has no claim.
func (req *request) releaseUnclaimed(ctx context.Context) (err error) {
	unlock, err := req.lock(ctx, "the release of an unclaimed volume")
	if err != nil {
		return err
	}
	defer unlock()
	var l leftover
	var still bool
	err = req.State.View(ctx, func(v registry.View) error { l, still = req.leftoverOf(v, req.key.Volume); return nil })
	if err != nil || !still {
		return err
	}
	req.by.RetryUntil = time.Now().Add(roundLimit)
	if l.staged {
		if _, err := req.awaitNode(ctx, l.volume.Plugin); err != nil {
			return err
		}
	}
	if err := req.settleForRelease(ctx, use{staged: l.staged}); err != nil {
		return err
	}
	if err := req.unstage(ctx); err != nil {
		return err
	}
	if !l.attached {
		return nil
	}
	req.node = req.host.Node
	return req.detach(ctx)
}
