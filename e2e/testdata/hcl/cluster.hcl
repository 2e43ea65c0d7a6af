# The configuration of the only node of a cluster, whose etcd is at ETCD.

cluster {
  id        = "test"
  expect    = 1
  endpoints = ["ETCD"]
}
