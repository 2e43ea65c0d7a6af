package store

// Newest is the schema that this release writes.
const Newest = 1

// released is the window of schemas that this release reads and writes.
var released = schema{oldest: Oldest, newest: Newest, readable: Oldest}
