job "x" {
  group "g" {
    task "inside" {
      driver = "exec"
      csi_plugin {
        id                     = "a"
        type                   = "node"
        mount_dir              = "/csi"
        stage_publish_base_dir = "/csi/volumes"
      }
    }
    task "around" {
      driver = "exec"
      csi_plugin {
        id        = "a"
        type      = "node"
        mount_dir = "/local/csi/socket"
      }
    }
    task "equal" {
      driver = "exec"
      csi_plugin {
        id        = "a"
        type      = "node"
        mount_dir = "/local/csi"
      }
    }
    task "system" {
      driver = "exec"
      csi_plugin {
        id                     = "a"
        type                   = "node"
        mount_dir              = "/dev/csi"
        stage_publish_base_dir = "/proc/x"
      }
    }
    task "root" {
      driver = "exec"
      csi_plugin {
        id                     = "a"
        type                   = "node"
        mount_dir              = "/"
        stage_publish_base_dir = "/a-directory-whose-name-is-far-too-long-for-any-csi-plugin-to-bear"
      }
    }
    task "reference" {
      driver = "exec"
      csi_plugin {
        id        = "csi-${node.unique.id}"
        type      = "node"
        mount_dir = "/csi/${NOMAD_ALLOC_ID}"
      }
    }
  }
}
