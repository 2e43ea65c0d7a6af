# A Ceph image, to be created. Secrets are references: the file says where their values are, and each call reads them
# anew.

id           = "database"
name         = "database"
type         = "csi"
plugin_id    = "ceph-rbd"
capacity_min = "10GiB"
capacity_max = "20GiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

parameters {
  "clusterID"                 = "00000000-0000-0000-0000-000000000000"
  "pool"                      = "rbd"
  "imageFeatures"             = "layering"
  "csi.storage.k8s.io/fstype" = "ext4"
}

secrets {
  userID  = { env = "CEPH_USER" }
  userKey = { file = "/etc/holdfast/ceph.key" }
  token   = { callback = "ceph/token" }
}
