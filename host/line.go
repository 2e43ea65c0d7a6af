package host

import "slices"

// line is where calls that change something wait for a shim, so that they go out in the order in which they came: the first goes, and once it is
// on its way the next. Its gate's mutex guards it.
type line []*place

// place is one call's in a line.
type place struct {
	turn chan struct{} // holds a token after the call has become the first
}

// join appends a call.
func (l *line) join() *place {
	p := &place{turn: make(chan struct{}, 1)}
	*l = append(*l, p)
	return p
}

// first says whether it is this call's turn.
func (l line) first(p *place) bool { return len(l) > 0 && l[0] == p }

// leave removes a call, and tells the one behind it if that is the first now.
func (l *line) leave(p *place) {
	i := slices.Index(*l, p)
	if i < 0 {
		return
	}
	*l = slices.Delete(*l, i, i+1)
	if i > 0 || len(*l) == 0 {
		return
	}
	select {
	case (*l)[0].turn <- struct{}{}:
	default: // it knows
	}
}
