//go:build next

package bootstrap

// versions are those of the next release. It still speaks the one of the release before: of two builds the highest common one counts.
var versions = []int{1, 2}
