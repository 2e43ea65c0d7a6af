package store

// Newest is the schema that this release writes.
const Newest = 1

// released is the schema of this release.
var released = schema{oldest: Oldest, newest: Newest, readable: Oldest}
