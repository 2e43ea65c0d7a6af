variable "d" {}
variable "csifake" {}

job "fake" {
  group "plugin" {
    task "fake" {
      driver = "exec"

      config {
        command = var.csifake
        args = [
          "--journal=${var.d}/journal", "--script=${var.d}/script", "--state=${var.d}/backend", "--data=${var.d}/data", "--mounts",
          "--caps=CREATE_DELETE_VOLUME,PUBLISH_UNPUBLISH_VOLUME,STAGE_UNSTAGE_VOLUME,GET_VOLUME_STATS,VOLUME_CONDITION", "--instance=${NOMAD_ALLOC_ID}",
        ]
      }

      csi_plugin {
        id   = "fake"
        type = "monolith"
      }
    }
  }
}
