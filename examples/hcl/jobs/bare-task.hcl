# The smallest file that runs a plugin: a task. Holdfast makes a job and a group of the same name.

task "loopfs-alone" {
  driver = "exec"

  config {
    command = "loopfs"
    args    = ["--endpoint=${CSI_ENDPOINT}", "--data=/var/lib/loopfs"]
  }

  csi_plugin {
    id   = "loopfs-alone"
    type = "monolith"
  }
}
