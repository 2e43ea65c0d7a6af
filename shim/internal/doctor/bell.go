package doctor

// Bell wakes one who sleeps. Rings that come before it wakes are one.
type Bell chan struct{}

// NewBell is a bell that has not rung.
func NewBell() Bell { return make(Bell, 1) }

// Ring never blocks.
func (b Bell) Ring() {
	select {
	case b <- struct{}{}:
	default:
	}
}
