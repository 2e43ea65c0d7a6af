package bootstrap

// versions are the versions of the wire protocol that this build speaks, as host and as shim. The version of the
// release before is still spoken: of two builds the highest common version counts.
var versions = []int{1, 2}
