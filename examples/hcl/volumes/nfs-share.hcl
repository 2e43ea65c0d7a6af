# An existing NFS share, to be registered: external_id is what the driver calls it, context is what the driver needs in
# order to mount it.

id          = "share"
namespace   = "media"
type        = "csi"
plugin_id   = "nfs"
external_id = "nas.example.net#srv/media#"

capability {
  access_mode     = "multi-node-multi-writer"
  attachment_mode = "file-system"
}

context {
  server           = "nas.example.net"
  share            = "/srv/media"
  mountPermissions = "0"
}

mount_options {
  fs_type     = "nfs"
  mount_flags = ["nfsvers=4.2", "hard", "timeo=600"]
}
