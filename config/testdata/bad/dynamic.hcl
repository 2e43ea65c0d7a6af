job "x" {
  group "g" {
    dynamic "netwrk" {
      for_each = [1]
      content {}
    }
    dynamic "network" {
      for_each = "x"
      content {}
    }
    dynamic "network" {
      content {}
    }
    dynamic "task" {
      for_each = ["a", "a"]
      labels   = [task.value]
      content {
        driver = "exec"
      }
    }
  }
}
